"""A real Slurm of one node on this machine, without accounting: munged, slurmctld and slurmd, as root."""

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from free_ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextmanager
def running_slurm(folder: Path) -> Iterator[Path]:
    """The configuration, for SLURM_CONF."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"Slurm is not installed: {missing[0]}")
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm of its own")
    folder.chmod(0o755)
    (folder / "munge").mkdir(mode=0o755)
    key = folder / "munge" / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    socket_path = folder / "munge" / "socket"
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname()
    conf = folder / "slurm.conf"
    conf.write_text(
        f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmctldPort={free_port()}\n"
        f"SlurmdPort={free_port()}\nAuthType=auth/munge\nAuthInfo=socket={socket_path}\nCryptoType=crypto/munge\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n"
        f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
        "AccountingStorageType=accounting_storage/none\nReturnToService=2\nSelectType=select/cons_tres\n"
        "SelectTypeParameters=CR_Core\nSlurmdParameters=config_overrides\nKillWait=30\nMpiDefault=none\n"
        "SchedulerParameters=sched_interval=1,sched_min_interval=0\n"
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN\n"
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP\n"
    )
    logs = folder / "daemons.log"
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}", *munge],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", host],
    )
    started = []
    pause = threading.Event()
    try:
        with logs.open("ab") as log:
            for words in commands:
                program = shutil.which(words[0], path=PATH)
                environment = {**os.environ, "SLURM_CONF": str(conf)}
                started.append(
                    subprocess.Popen([program, *words[1:]], stdout=log, stderr=log, env=environment)
                )
                pause.wait(0.5)
        for _ in range(150):
            asked = subprocess.run(
                ["sinfo", "-h", "-o", "%T"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "SLURM_CONF": str(conf)},
            )
            if asked.stdout.strip() == "idle":
                break
            pause.wait(0.2)
        else:
            pytest.skip(f"Slurm does not start here: {logs.read_text()[-300:]!r}")
        yield conf
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(300)
