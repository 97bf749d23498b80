"""What a place adds to a job: the time from submit to the fetched result, less that of the job itself.

The job is a chain of hashes with a checkpoint a step, so that almost all of the time is that of the place.
It runs in turn as a plain process, at the place `local`, and at `ssh` on an sshd of this machine, each time
with a new login; the medians of wall and of processor time are shown. A login over SSH that does nothing is
timed as well: that much is not ours. Afterwards a bundle with a dataset is submitted twice, and the bytes
that were sent are counted. Linux.

    python benchmarks/fleet_overhead.py [--rounds 5] [--megabytes 50]
"""

import argparse
import ctypes
import gc
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contract"))

from ssh_server import running_sshd

from graftwork.fleet.bundle import BundleParts, build_bundle
from graftwork.fleet.hosts import HostsPlace, local_place, ssh_place
from graftwork.fleet.place import make_label
from graftwork.fleet.settings import HostSettings
from graftwork.process.ssh import ssh_command
from graftwork.records.fleet import BundleBase, JobOrder

MODULE = "graftwork.fleet.trial_worker"
STEPS = 20


class Meter:
    """Seconds of the clock and of the processors, those of all processes that were started included."""

    def __init__(self, sshd: int) -> None:
        self._sshd = Path(f"/proc/{sshd}/stat")
        # Processes that outlive their parent become children of this one, which counts them at their end.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)

    def measure(self, run: Callable[[], object]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), self._cpu()
        run()
        taken = time.perf_counter() - wall
        gc.collect()
        for _ in range(100):
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.005)
        return taken, self._cpu() - cpu

    def _cpu(self) -> float:
        own = os.times()
        sessions = self._sshd.read_text().rpartition(")")[2].split()
        ticks = sum(map(int, sessions[11:15])) / os.sysconf("SC_CLK_TCK")
        return own.user + own.system + own.children_user + own.children_system + ticks


def log_in() -> None:
    """A login that does nothing."""
    subprocess.run([*ssh_command(), "127.0.0.1", "true"], check=True, stdin=subprocess.DEVNULL)


def run_directly(folder: Path) -> float:
    began = time.perf_counter()
    job = folder / "job.json"
    folder.mkdir(parents=True)
    job.write_text(json.dumps({"run_id": "run1", "folder": str(folder / "run"), "steps": STEPS}))
    (folder / "run").mkdir()
    subprocess.run([sys.executable, "-m", MODULE, str(job)], check=True)
    return time.perf_counter() - began


def order_of(bundle: Path) -> JobOrder:
    job_id = secrets.token_hex(6)
    return JobOrder(
        job_id=job_id, label=make_label("0" * 8, job_id), run_id="run1", bundle=str(bundle), seconds=600.0
    )


def run_at(place: HostsPlace, bundle: Path, folder: Path) -> float:
    began = time.perf_counter()
    job = place.submit(order_of(bundle), secrets={})
    while (found := place.wait(job, 10.0)).phase != "ended":
        pass
    place.fetch(job, folder)
    taken = time.perf_counter() - began
    if found.exit_code:
        sys.exit(place.log(job))
    return taken


def make_bundle(root: Path, *, checkpoint: Path | None = None) -> Path:
    parts = BundleParts(
        run_id="run1",
        module=MODULE,
        job={"steps": STEPS},
        base=BundleBase(kind="none", name="", revision=""),
        start_adapter=checkpoint,
    )
    return build_bundle(parts, root)[0]


def measure(rounds: int, megabytes: int) -> None:
    with tempfile.TemporaryDirectory(prefix="graft-overhead-") as root:
        folder = Path(root)
        (folder / "sshd").mkdir()
        with running_sshd(folder / "sshd") as command:
            os.environ["GRAFT_SSH"] = command
            far = HostSettings(address="127.0.0.1", python=sys.executable, folder=str(folder / "far"))
            bundle = make_bundle(folder / "bundles")
            opened: dict[str, Callable[[], HostsPlace]] = {
                "local": lambda: local_place(folder / "near"),
                "ssh": lambda: ssh_place({"far": far}),
            }
            for name, open_place in opened.items():
                # Once before: the wheel is sent and unpacked.
                run_at(open_place(), bundle, folder / f"warm-{name}")
            meter = Meter(int(subprocess.check_output(["pgrep", "-nf", f"sshd.*{root}"])))
            costs: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for number in range(rounds):
                costs["direct"].append(meter.measure(lambda n=number: run_directly(folder / f"direct-{n}")))
                for name, open_place in opened.items():
                    at = folder / f"{name}-{number}"
                    costs[name].append(meter.measure(lambda o=open_place, at=at: run_at(o(), bundle, at)))
                costs["login"].append(meter.measure(log_in))
            _show(costs, rounds)
            _count_bytes(folder, opened["ssh"](), megabytes)


def _show(costs: Mapping[str, list[tuple[float, float]]], rounds: int) -> None:
    def median(name: str, which: int, *, over: str = "") -> float:
        less = [cost[which] for cost in costs[over]] if over else [0.0] * rounds
        return statistics.median(cost[which] - other for cost, other in zip(costs[name], less, strict=True))

    print(f"median of {rounds}, load {os.getloadavg()[0]:.1f}{'':<8}{'wall':>10}{'processor':>12}")
    rows = (("the job itself", "direct", ""), ("overhead of local", "local", "direct"))
    for title, name, over in (*rows, ("overhead of ssh", "ssh", "direct"), ("a login over SSH", "login", "")):
        wall, cpu = (median(name, which, over=over) for which in (0, 1))
        print(f"{title:<28}{wall:8.2f} s{cpu:10.2f} s")


def _count_bytes(folder: Path, place: HostsPlace, megabytes: int) -> None:
    data = folder / "data"
    data.mkdir()
    (data / "shard.bin").write_bytes(os.urandom(megabytes << 20))
    bundle = make_bundle(folder / "bundles", checkpoint=data)
    for which in ("first", "second"):
        began = time.perf_counter()
        job = place.submit(order_of(bundle), secrets={})
        print(f"{which + ' submit':<24}{place.sent_bytes:>12,} bytes in {time.perf_counter() - began:5.2f} s")
        while place.wait(job, 10.0).phase != "ended":
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=50)
    given = parser.parse_args()
    measure(given.rounds, given.megabytes)


if __name__ == "__main__":
    main()
