"""Generation: prompts in, answers out, through the decoder that fits the model.

In: prompts as tokens. Out: the generated tokens and why generation stopped. Knows nothing of templates, cases
or HTTP.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from graftwork.model.adapters.rows import active_adapter
from graftwork.model.generate.attention import register_attention
from graftwork.model.generate.cache import cache_shape
from graftwork.model.generate.decoder import SlotDecoder, TokenPass
from graftwork.model.generate.memory import MOST_ROWS
from graftwork.model.generate.requests import Generated, GenerationRequest
from graftwork.model.generate.sampling import Sampling
from graftwork.model.generate.static import StaticDecoder

__all__ = ["Generated", "Generator", "OnToken", "Sampling", "open_decoder"]

OnToken = Callable[[int, int], bool]
"""Called with (row, token) for each new token; False ends that row."""
Decoder = SlotDecoder | StaticDecoder
ACTIVE = "\0active"
"""The adapter that acts in the model, whichever it is."""


def open_decoder(
    model: Any,
    *,
    stop_tokens: Iterable[int],
    slots: int,
    recorded: bool = False,
    token_pass: TokenPass | None = None,
) -> Decoder:
    """Slots where the model's memory fits them, else static batches."""
    use_grouped_attention(model)
    shape = cache_shape(model)
    if shape is None:
        return StaticDecoder(model, stop_tokens=stop_tokens, slots=slots)
    return SlotDecoder(
        model, shape, stop_tokens=stop_tokens, slots=slots, recorded=recorded, token_pass=token_pass
    )


def use_grouped_attention(model: Any) -> None:
    """A family that caps its scores (Gemma 2) keeps the attention that does so."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(register_attention())


class Generator:
    """Answers batches; no more than `slots` rows run at once, and ended ones are replaced.

    With `recorded`, a card replays recorded passes: only for a model whose weights and adapters stay.
    """

    def __init__(
        self, model: Any, *, stop_tokens: Iterable[int], recorded: bool = False, slots: int = MOST_ROWS
    ) -> None:
        self._model = model
        self.decoder = open_decoder(model, stop_tokens=stop_tokens, slots=slots, recorded=recorded)

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        on_token: OnToken | None = None,
        *,
        adapter: str | None = ACTIVE,
    ) -> list[Generated]:
        """Answer all prompts. The same prompts and sampling give the same answers."""
        if adapter == ACTIVE:
            adapter = active_adapter(self._model)
        self.decoder.forget_prefixes()
        self.decoder.reserve(len(prompts), max(map(len, prompts)) + sampling.max_new_tokens)
        requests = [
            GenerationRequest(prompt, sampling, row=row, adapter=adapter, on_token=_listener(on_token, row))
            for row, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.decoder.submit(request)
        try:
            self.decoder.finish()
        except BaseException:
            self.decoder.reset()
            raise
        return [request.result for request in requests]


def _listener(on_token: OnToken | None, row: int) -> Callable[[int], bool] | None:
    if on_token is None:
        return None
    return lambda token: on_token(row, token)
