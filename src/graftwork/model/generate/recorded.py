"""CUDA graphs: a pass over fixed shapes as a single launch on a GPU.

A small model's pass is hundreds of tiny kernels: launched one by one, the GPU waits for Python most of the
time. Input: a key and a function that reads and writes tensors of fixed addresses. Output: its result,
recorded at first use and replayed from then on. A recording holds as long as no tensor that it uses moves.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WARM_UPS = 2
"""Passes before a recording, until nothing is initialized or allocated any more."""


Recording = tuple["torch.cuda.CUDAGraph", Any]
"""A graph, and the function that renews the inputs of each replay."""


def record(compute: Callable[[], Any], *, pool: Any = None, stream: Any = None) -> Recording:
    """Record the launches of `compute`. Runs nothing; another thread may write a checkpoint meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = compute()
    return graph, result


class GraphRecorder:
    """Records on a GPU if `enabled`; otherwise it calls the function. `state` is advanced by a pass."""

    def __init__(self, *, enabled: bool, state: Callable[[], Tensor]) -> None:
        self.enabled = enabled
        self._state = state
        self._recordings: dict[Hashable, Recording] = {}
        self._uses: Counter[Hashable] = Counter()
        self.seconds = 0.0
        """Seconds spent on recording."""
        self._pool: Any = None

    def run(self, key: Hashable, compute: Callable[[], Tensor], *, after: int = 0) -> Tensor:
        """Return the result; a recorded one is overwritten by the next pass of its key. The first `after`
        passes of a key are not recorded: a recording takes as long as three passes.
        """
        self._uses[key] += 1
        if not self.enabled or self._uses[key] <= after:
            return compute()
        if key not in self._recordings:
            started_at = time.perf_counter()
            try:
                self._recordings[key] = self._record(compute)
                self.seconds += time.perf_counter() - started_at
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # some models decide in Python how they continue
                log.warning("this model's pass is not recorded: %s", error)
                self.enabled = False
                self.forget()
                return compute()
        graph, result = self._recordings[key]
        graph.replay()
        tensor: Tensor = result
        return tensor

    def forget(self) -> None:
        if self._recordings:
            torch.cuda.synchronize()  # none may still run
        self._recordings.clear()
        self._pool = None

    def _record(self, compute: Callable[[], Tensor]) -> Recording:
        """Warm up on a separate stream, then record. The warm-ups write what the pass will write again."""
        state = self._state()
        before = state.clone()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    compute()
                    state.copy_(before)
            torch.cuda.current_stream().wait_stream(aside)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            return record(compute, pool=self._pool)
        finally:
            torch.cuda.current_stream().wait_stream(aside)
            if not torch.cuda.is_current_stream_capturing():
                state.copy_(before)
