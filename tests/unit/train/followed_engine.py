"""The streaming engine on a CPU with every tensor followed, as a card's allocator would see them."""

import gc
import sys

import torch
from torch.utils._pytree import tree_leaves

from graftwork.costmodel.allocations import AllocationStream, AttentionSizes, flash_backward_sizes
from graftwork.costmodel.trace import Follower, _adds_in_place

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
PHASES = {"_learn_head": "loss", "_backward": "backward"}


class CpuFollower(Follower):
    """Here host and device are the same: what an operation makes is on the device, buffers of the host are
    not made by operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        if func is torch.ops.aten.add.Tensor and _going_back() and _accumulates_in_place(args):
            return args[0].add_(args[1])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage()._cdata not in given:
                self.add(leaf)
        if func.__name__.startswith(CPU_ATTENTION):
            query, key = args[1], args[2]
            rows, heads, queries, width = query.shape
            sizes = (rows, queries, key.shape[2], heads, key.shape[1], width, query.element_size())
            hidden = flash_backward_sizes(AttentionSizes(*sizes), deterministic=True)
            self.stream.use_together(hidden)
        return result


def _is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)


ONLY_IN_BACKWARD = 3
"""References to a gradient that nothing but the backward pass holds: the arguments and the look at it."""


def _accumulates_in_place(args):
    return sys.getrefcount(args[0]) <= ONLY_IN_BACKWARD + 1 and _adds_in_place(args)


def _going_back():
    return torch._C._current_graph_task_id() >= 0


def follow(make_engine, rows, *, steps=2):
    """The trace of some steps of a new engine."""
    stream = AllocationStream()
    follower = CpuFollower(stream, vocabulary=0, tokens=0)
    stream.enter("setup")
    with follower:
        engine = make_engine()
    passes = engine._passes
    for name, phase in PHASES.items():
        setattr(passes, name, _marked(stream, phase, getattr(passes, name)))
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            stream.enter("forward")
            with follower:
                engine.backward(rows)
            engine.apply(1e-4)
    finally:
        gc.enable()
    return stream.finish()


def _marked(stream, phase, function):
    def marked(*given, **named):
        stream.enter(phase)
        return function(*given, **named)

    return marked
