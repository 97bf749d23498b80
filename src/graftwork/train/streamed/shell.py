"""A decoder of transformers with its blocks taken out: what is before them, one block, what is after them.

In: a model and weights for each call. Out: the values of the model's own forward pass, in pieces. The
decoder's own code makes masks and positions: it is run with blocks that only record how they are called.
Knows nothing of where weights come from.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts, logits_reader
from graftwork.records.errors import UserMistake


class BlockCall(NamedTuple):
    """How the decoder calls a block, besides the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    by_name: bool
    """The hidden states are given by name, too."""


class _BlocksReached(Exception):
    """All calls are recorded: the rest of the decoder need not run."""


HIDDEN = "hidden_states"


class DecoderShell:
    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        parts, reader = decoder_parts(model), logits_reader(model)
        decoder: nn.Module = parts.decoder
        follows = reader.decoder is parts.decoder
        if not follows:
            raise UserMistake(
                f"{type(model).__name__} cannot be streamed",
                why="what it does behind its head is not known",
                fix="set `train.strategy: fsdp`, or remove `train.offload`",
            )
        self.blocks = list(parts.blocks)
        self.embedding = model.get_input_embeddings()
        self._decoder = decoder
        self._head, self._logits = parts.head, reader.logits
        self._in_tuple = False
        self.padding: int | None = getattr(self.embedding, "padding_idx", None)
        """The token whose row is not trained."""
        self.row_scale = self._probe_rows(dtype)
        """What the embedding multiplies a row of its table by."""
        for module in decoder.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def embed(self, tokens: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        with weights_of_call(self.embedding, weights):
            rows: Tensor = self.embedding(tokens)
        return rows

    @torch.no_grad()
    def _probe_rows(self, dtype: torch.dtype) -> float:
        """Look up rows of a table of zeros and of one of ones: the embedding may scale them, and no more."""
        weight = self.embedding.weight
        tokens = torch.tensor([[0, weight.shape[0] - 1]], device=weight.device)
        ones = torch.ones((), dtype=dtype, device=weight.device)
        nothing, found = (
            self.embed(tokens, {"weight": (ones * value).expand(weight.shape)}) for value in (0, 1)
        )
        factor = float(found.flatten()[0])
        if not factor or nothing.any() or not bool((found == factor).all()):
            raise UserMistake(
                f"{type(self.embedding).__name__} cannot be streamed",
                why="it does more to a row of its table than to scale it",
                fix="set `train.strategy: fsdp`, or remove `train.offload`",
            )
        return factor

    def enter(
        self, embedded: Tensor, attended: Tensor, outer: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[BlockCall]]:
        """The first block's hidden states, and how each block is called."""
        first: list[Tensor] = []
        calls: list[BlockCall] = []

        def record(*given: Any, **named: Any) -> Tensor:
            by_name = not given
            hidden: Tensor = named.pop(HIDDEN) if by_name else given[0]
            if not first:
                first.append(hidden)
            calls.append(BlockCall(given[1:], named, by_name))
            if len(calls) == len(self.blocks):
                raise _BlocksReached
            return hidden

        with self._blocks_do(lambda _at: record):
            try:
                self._call(embedded, attended, outer)
            except _BlocksReached:
                return first[0], calls
        raise UserMistake(
            "this decoder does not call all of its blocks",
            fix="set `train.strategy: fsdp`, or remove `train.offload`",
        )

    def run(self, at: int, weights: Mapping[str, Tensor], hidden: Tensor, call: BlockCall) -> Tensor:
        """One block."""
        given = () if call.by_name else (hidden,)
        named = {HIDDEN: hidden, **call.named} if call.by_name else call.named
        with weights_of_call(self.blocks[at], weights):
            out: Any = self.blocks[at](*given, *call.arguments, **named)
        self._in_tuple = isinstance(out, tuple)
        result: Tensor = out[0] if self._in_tuple else out
        return result

    def leave(self, hidden: Tensor, attended: Tensor, outer: Mapping[str, Tensor]) -> Tensor:
        """What the decoder makes of the last block's hidden states."""
        last = len(self.blocks) - 1

        def answer(at: int) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                out = hidden if at == last else (given[0] if given else named[HIDDEN])
                return (out,) if self._in_tuple else out

            return forward

        nothing = torch.zeros((), device=hidden.device, dtype=hidden.dtype).expand(hidden.shape)
        with self._blocks_do(answer):
            found: Tensor = self._call(nothing, attended, outer).last_hidden_state
        return found

    def logits(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        with weights_of_call(self._head, weights):
            return self._logits(hidden)

    def _call(self, embedded: Tensor, attended: Tensor, outer: Mapping[str, Tensor]) -> Any:
        named = {"inputs_embeds": embedded, "attention_mask": attended, "use_cache": False}
        with weights_of_call(self._decoder, outer):
            return self._decoder(**named)

    @contextmanager
    def _blocks_do(self, forward: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        for at, block in enumerate(self.blocks):
            block.forward = forward(at)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


@contextmanager
def weights_of_call(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The module computes with these weights for a moment; its own are put back, ties included."""
    places = [
        (module.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in weights)
    ]
    own = [owner._parameters[leaf] for owner, leaf in places]
    for (owner, leaf), weight in zip(places, weights.values(), strict=True):
        owner._parameters[leaf] = weight  # type: ignore[assignment]
    try:
        yield
    finally:
        for (owner, leaf), parameter in zip(places, own, strict=True):
            owner._parameters[leaf] = parameter
