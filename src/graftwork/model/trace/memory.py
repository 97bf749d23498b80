"""The peak memory of a training step of any decoder of transformers, without a card and without weights.

In: the model's configuration and a PlainSetup. Out: a MemoryPeak, or the whole stream of what comes and
goes. Two steps are followed: the second one finds the optimizer's states. Does not know how the allocator
cuts what it reserves: `reserved` is what was allocated, until somebody replays the stream.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graftwork.model.trace.build import build_model
from graftwork.model.trace.casts import CastMode, cuda_autocast
from graftwork.model.trace.follow import Follower
from graftwork.model.trace.kernels import ATTENTION, FusedLoss, register_attention
from graftwork.model.trace.optimizer import Weight, keep_states, take_step
from graftwork.model.trace.stream import AllocationStream, MemoryTrace
from graftwork.records.fit import MemoryPeak, PlainSetup

STEPS = 2


def trace_peak(config: dict[str, Any], setup: PlainSetup) -> MemoryPeak:
    """The most that a card holds, and for what."""
    return trace_run(config, setup).peak


def trace_run(config: dict[str, Any], setup: PlainSetup) -> MemoryTrace:
    """Two steps, as the memory sees them."""
    register_attention()
    attention = ATTENTION if setup.attention == "flash" else "sdpa"
    casts = CastMode(_low_type(setup)) if setup.autocast else None

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # A layer that runs again finds autocast left, and the mode suspended by the call to `backward`.
        return nullcontext(), cuda_autocast(casts)

    model: Any = build_model(config, setup, device="meta", attention=attention, contexts=contexts)
    stream = AllocationStream()
    stream.enter("setup")
    vocabulary = model.config.vocab_size
    follower = Follower(stream, vocabulary=vocabulary, tokens=setup.rows * setup.tokens)
    _hold_model(model, follower)
    _mark_layers(model, stream)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights: list[Weight] = [(p.numel(), p.element_size()) for p in trained]
    ids = torch.empty(setup.rows, setup.tokens, dtype=torch.int64, device="meta")
    follower.add(ids, part="activations")
    gc.collect()
    gc.disable()
    try:
        for step in range(STEPS):
            _follow_passes(model, ids, setup, follower, casts)
            stream.enter("optimizer")
            if step == 0:
                keep_states(stream, weights, setup.optimizer)
            take_step(stream, weights, setup.optimizer)
            for parameter in trained:
                parameter.grad = None
    finally:
        gc.enable()
    return stream.finish()


def _hold_model(model: Any, follower: Follower) -> None:
    for parameter in model.parameters():
        follower.add(
            parameter, part="adapters" if parameter.requires_grad and _is_adapter(model) else "weights"
        )
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            for part in (state.absmax, state.code, state.offset, state.state2.absmax):
                follower.add(part, part="weights")
    for buffer in model.buffers():
        follower.add(buffer, part="weights")


def _mark_layers(model: Any, stream: AllocationStream) -> None:
    """Let the stream know when backward leaves the head and the loss and enters the layers."""

    def before_head(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].requires_grad:
            given[0].register_hook(lambda _: stream.enter("layers"))  # type: ignore[no-untyped-call]

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.get_output_embeddings().register_forward_pre_hook(before_head)


def _is_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _low_type(setup: PlainSetup) -> torch.dtype:
    kind: torch.dtype = getattr(torch, setup.dtype if setup.dtype != "float32" else "bfloat16")
    return kind


def _follow_passes(
    model: Any, ids: torch.Tensor, setup: PlainSetup, follower: Follower, casts: CastMode | None
) -> None:
    """Forward, loss and backward of one micro-batch."""
    with follower:
        follower.stream.enter("forward")
        follower.thread = "forward"
        with cuda_autocast(casts):
            loss = _loss(model, ids, setup)
        follower.stream.enter("backward")
        follower.thread = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None:
                follower.rename(parameter.grad, "gradients")
    del loss


def _loss(model: Any, ids: torch.Tensor, setup: PlainSetup) -> torch.Tensor:
    if setup.loss == "plain":
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False)[0]
    weight = inner.get_output_embeddings().weight
    kind = _low_type(setup) if setup.autocast else hidden.dtype
    head_and_loss: Any = FusedLoss
    places = hidden.view(-1, hidden.shape[-1])
    fused: torch.Tensor = head_and_loss.apply(places, weight, kind, weight.requires_grad)
    return fused
