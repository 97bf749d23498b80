"""A step recorded once and replayed: the card is not kept waiting for the host.

In: a decoder and batches of few shapes. Out: the same losses and gradients. A small micro-batch takes
the host longer to launch than the card to compute; replayed as one graph it costs one launch. The
first time of a shape runs plainly, twice where that compiles; the next one is recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graftwork.train.gpu.decoder import GpuDecoder, PackedLayout


@dataclass(frozen=True)
class GraphRecording:
    graph: Any
    x: Tensor
    packed: PackedLayout
    scale: Tensor
    loss: Tensor


class CudaGraphDecoder:
    """Stands in for the decoder where there is a card. Gradients live in fixed places from the start."""

    def __init__(self, decoder: GpuDecoder, parameters: Sequence[Tensor], *, plain_runs: int = 1) -> None:
        self.decoder = decoder
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._runs: dict[Any, int] = {}
        self._recordings: dict[Any, GraphRecording] = {}
        self._plain: set[Any] = set()
        self._plain_runs = plain_runs
        self._pool = torch.cuda.graph_pool_handle()

    def learn(
        self, x: Tensor, packed: PackedLayout, scale: Tensor, pulse: Callable[[], None] = lambda: None
    ) -> Tensor:
        shape = _shape_of(x, packed)
        if shape not in self._recordings:
            seen = self._runs.get(shape, 0)
            self._runs[shape] = seen + 1
            if seen < self._plain_runs or shape in self._plain:
                return self.give_way(lambda: self.decoder.learn(x, packed, scale, pulse))
            try:
                self._recordings[shape] = self._record(x, packed, scale)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # What a recording needs beside the others is not there: this shape stays plain.
                self._plain.add(shape)
                return self.give_way(lambda: self.decoder.learn(x, packed, scale, pulse))
        recording = self._recordings[shape]
        _copy_into(recording, x, packed, scale)
        recording.graph.replay()
        pulse()
        return recording.loss.clone()

    def give_way(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute something plainly; where the recordings leave it no room, without them.

        A pass that runs out of memory has added nothing to the gradients yet: they are added last.
        """
        try:
            return compute()
        except torch.OutOfMemoryError:
            self._recordings.clear()
            torch.cuda.empty_cache()
        return compute()

    def _record(self, x: Tensor, packed: PackedLayout, scale: Tensor) -> GraphRecording:
        """Recording computes nothing: gradients stay what they are until the first replay."""
        still = PackedLayout(
            positions=packed.positions.clone(),
            documents=replace(packed.documents, starts=packed.documents.starts.clone()),
            predicts=packed.predicts.clone(),
            targets=packed.targets.clone(),
        )
        x, scale = x.clone(), scale.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # A checkpoint is written meanwhile by a thread that has nothing to do with this.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss = self.decoder.learn(x, still, scale)
        return GraphRecording(graph, x, still, scale, loss)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, also where that shows only behind the end of a recording."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError):
            return True
        found = found.__context__
    return False


def _shape_of(x: Tensor, packed: PackedLayout) -> Any:
    documents = packed.documents
    even = documents.lengths if documents.even else (documents.longest,)
    return tuple(x.shape), even, documents.starts.shape[0], packed.predicts.shape[0]


def _copy_into(recording: GraphRecording, x: Tensor, packed: PackedLayout, scale: Tensor) -> None:
    recording.x.copy_(x)
    recording.scale.copy_(scale)
    recording.packed.positions.copy_(packed.positions)
    recording.packed.documents.starts.copy_(packed.documents.starts)
    recording.packed.predicts.copy_(packed.predicts)
    recording.packed.targets.copy_(packed.targets)
