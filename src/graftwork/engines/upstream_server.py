"""A vLLM or SGLang server as a child process on a loopback port.

In: the engine's job. Out: its URL. Never a public port: those who can load adapters can read files. The
server ends with this process.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from graftwork.engines.protocol import EngineJob
from graftwork.files.disk import append_to
from graftwork.model.adapter_shape import CONFIG_FILE
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EnvironmentLacks, WorkerFailed

LOG_FILE = "server.log"
LOWEST_RANK = 64
"""Memory for adapters is reserved at the start: releases to come may have a higher rank than today's."""
_STOP_SECONDS = 20.0
_RUN_TIED = (
    "import runpy, sys; from graftwork.process.worker import stop_with_parent; stop_with_parent(); "
    "sys.argv = sys.argv[1:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
"""Runs a module in a process that ends when its parent does, even after kill -9."""
NOT_SERVED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
)
"""What vLLM refuses in an adapter, as PEFT calls it."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM lays out memory for; an adapter takes the next one above its own."""
KEEPS_TO_ITSELF = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Else it looks for this machine's address by way of a public name server.
    "VLLM_HOST_IP": "127.0.0.1",
}


def server_command(job: EngineJob, *, port: int) -> list[str]:
    """The command that serves the base with room for adapters."""
    ranks = [lora_rank(Path(folder)) or 0 for folder in job.adapters.values()]
    rank, most = str(max([LOWEST_RANK, *ranks])), job.engine.max_adapters
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if job.engine.kind == "vllm":
        adapters = ["--enable-lora", "--max-loras", str(most), "--max-cpu-loras", str(most + 1)]
        command = ["vllm.entrypoints.openai.api_server", "--model", job.base_folder, *adapters]
        command += ["--max-lora-rank", rank, "--dtype", job.dtype, "--generation-config", "vllm"]
    else:
        adapters = ["--enable-lora", "--max-loras-per-batch", str(most), "--max-loaded-loras", str(most + 1)]
        command = ["sglang.launch_server", "--model-path", job.base_folder, *adapters]
        command += ["--max-lora-rank", rank, "--lora-target-modules", "all", "--dtype", job.dtype]
    return [sys.executable, "-c", _RUN_TIED, *command, *where, *job.engine.arguments]


class UpstreamServer:
    def __init__(self, job: EngineJob) -> None:
        package = job.engine.kind
        if importlib.util.find_spec(package) is None:
            raise EnvironmentLacks(
                f"{package} is not installed in this environment",
                why="the engine is started from it",
                fix=f"pip install {package}, or start it elsewhere and set serve.engine.url",
                where="serve.engine.kind",
            )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = Path(job.folder) / LOG_FILE
        allowed = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "HF_HUB_OFFLINE": "1"}
        with append_to(self._log) as log:
            self._process = subprocess.Popen(
                server_command(job, port=port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **KEEPS_TO_ITSELF, **allowed, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def explain_end(self) -> WorkerFailed:
        lines = self._log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
        return WorkerFailed(
            f"the server ended with exit code {self._process.returncode}",
            why=lines[-1] if lines else "",
            fix="see its log",
            where=str(self._log),
        )

    def stop(self) -> None:
        """End it and the processes that it started."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def lora_rank(folder: Path) -> int | None:
    """The memory that vLLM must reserve for the adapter; None for one that it cannot serve."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in NOT_SERVED):
        return None
    largest = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((rank for rank in RANKS if rank >= largest), None)
