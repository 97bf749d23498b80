"""A model borrowed in the middle of training, and given back as it was.

In: a model that learns. Out: the same model, for a while in evaluation mode and eager, then with
the modes, the attention and the random states that it had. What is done meanwhile leaves no trace
in the steps that follow.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def eval_mode(model: Any) -> Iterator[Any]:
    modes = {module: module.training for module in model.modules()}
    attention = getattr(model.config, "_attn_implementation", None)
    caching = getattr(model.config, "use_cache", None)
    random = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    model.eval()
    try:
        with _eagerly():
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


def _eagerly() -> Any:
    """One more token each time is one more shape each time: compiled layers would compile for ever."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
