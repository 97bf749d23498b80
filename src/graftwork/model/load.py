"""A base model in memory, frozen, from safetensors only.

Input: a folder. Output: a transformers model in evaluation mode. Runs nothing that came with weights.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graftwork.files.disk import file_digest
from graftwork.process.preload import import_without_unused
from graftwork.records.errors import EnvironmentFailure, UserError, needs_extra

if TYPE_CHECKING:
    import torch

DIGEST_THREADS = 8


def load_base(folder: Path, *, dtype: str = "float32", device: str = "cpu", four_bits: bool = False) -> Any:
    """Load the decoder with every parameter frozen. Never uses the network. With `four_bits`, the linear
    layers of its blocks are quantized on the way to the device, one by one: the device never holds more than
    one of them unquantized. The host holds the model in `dtype` while it is read.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_without_unused(["transformers.modeling_utils"])
    with needs_extra("train", why="a model is to be loaded"):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(
            "the base model could not be loaded",
            why=str(error).splitlines()[0],
            fix="check the folder; it must hold a decoder that transformers knows, as safetensors",
            where=str(folder),
        ) from error
    model.requires_grad_(False)
    if four_bits:
        quantize_blocks(model, device=device)
    return model.to(device).eval()


def quantize_blocks(model: Any, *, device: str) -> int:
    """Quantize the linear layers of the blocks to four bits; returns how many. Layers without whole blocks
    stay.
    """
    from torch import nn

    from graftwork.model.nf4 import can_quantize, quantize_linear
    from graftwork.model.parts import block_linears

    done = 0
    # Names, not layers: a reference to a layer would keep all its full weights in memory.
    for path in [path for _, path, _ in block_linears(model)]:
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear) and can_quantize(layer.weight):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, quantize_linear(layer, device=device))
            done += 1
    if not done:
        raise UserError(
            "no layer of this base can be kept in 4 bits",
            why="none of its linear layers has a multiple of 64 inputs, or it keeps them transposed (GPT-2)",
            fix="set `train.method: lora`",
        )
    return done


def tensors_digest(
    tensors: dict[str, "torch.Tensor"], *, whole: "Callable[[torch.Tensor], torch.Tensor] | None" = None
) -> str:
    """One hash over names, types and bytes of tensors; `whole` gathers a sharded one."""
    import torch

    outer = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name] if whole is None else whole(tensors[name])
        tensor = tensor.detach().cpu().contiguous()
        outer.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        outer.update(tensor.view(torch.uint8).numpy().data if tensor.dim() else tensor.numpy().tobytes())
    return outer.hexdigest()


def base_digest(model: Any, *, whole: "Callable[[torch.Tensor], torch.Tensor] | None" = None) -> str:
    """Hash the weights in memory that no training may change, codes of quantized ones included."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    # An adapter wraps a layer and so lengthens its name; the weights are the same.
    tensors = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in (*model.named_parameters(), *buffers.items())
        if ".lora_" not in name
    }

    def digest(name: str) -> str:
        return tensors_digest({name: tensors[name]}, whole=whole)

    # Gathering a sharded tensor is a collective of the main thread; otherwise threads share the work.
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        apply = map if whole is not None else threads.map
        return hashlib.sha256("\n".join(apply(digest, sorted(tensors))).encode()).hexdigest()


def base_files_digest(folder: Path) -> str:
    """Hash the weights on disk, if those in memory are being trained."""
    outer = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        outer.update(f"{path.name} {file_digest(path)}\n".encode())
    return outer.hexdigest()


@contextmanager
def eval_mode(model: Any) -> Iterator[Any]:
    modes = {module: module.training for module in model.modules()}
    attention = getattr(model.config, "_attn_implementation", None)
    caching = getattr(model.config, "use_cache", None)
    random = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    model.eval()
    try:
        # One more token each time is one more shape each time: compiled layers would always recompile.
        eagerly: Any = nullcontext()
        if "torch._dynamo" in sys.modules:
            eagerly = torch.compiler.set_stance("force_eager")
        with eagerly:
            yield model
    finally:
        for module, training in modes.items():
            module.training = training
        if getattr(model.config, "_attn_implementation", None) != attention:
            model.set_attn_implementation(attention)
        if caching is not None:
            model.config.use_cache = caching
        torch.set_rng_state(random)
        if devices:
            torch.cuda.set_rng_state_all(devices)
