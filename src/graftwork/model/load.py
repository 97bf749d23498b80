"""A base model in memory, frozen, from safetensors only.

In: a folder. Out: a transformers model in evaluation mode. Runs nothing that came with weights.
"""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.errors import EnvironmentLacks

if TYPE_CHECKING:
    import torch


def load_base(folder: Path, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """The decoder with every parameter frozen. Never reaches for the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise EnvironmentLacks(
            f"the package {error.name} is not installed",
            why="a model is to be loaded",
            fix='pip install "graftwork[train]"',
        ) from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise EnvironmentLacks(
            "the base model could not be loaded",
            why=str(error).splitlines()[0],
            fix="check the folder; it must hold a decoder that transformers knows, as safetensors",
            where=str(folder),
        ) from error
    model.requires_grad_(False)
    return model.to(device).eval()


def use_threads(threads: int | None) -> int:
    """Fix the number of threads: the same number gives the same sums, bit by bit."""
    import torch

    count = threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads or 1
    torch.set_num_threads(count)
    return count


def tensors_digest(tensors: dict[str, "torch.Tensor"]) -> str:
    """One hash over names, types and bytes of tensors."""
    import torch

    outer = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        outer.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        outer.update(tensor.view(torch.uint8).numpy().data if tensor.dim() else tensor.numpy().tobytes())
    return outer.hexdigest()


def base_digest(model: Any) -> str:
    """The weights in memory that no training may change."""
    # An adapter wraps a layer and so lengthens its name; the weights are the same.
    return tensors_digest(
        {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if ".lora_" not in n}
    )
