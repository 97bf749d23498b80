"""A request for an answer, as decoders take it, and the answer as it grows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from graftwork.model.generate.constraint import TokenOptions
from graftwork.model.generate.sampling import RowSampling, Sampling


@dataclass
class Generated:
    """An answer: its tokens without the stop token, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


class GenerationRequest:
    """One prompt. `on_token` gets each new token and ends the answer by returning False."""

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        row: int = 0,
        adapter: str | None = None,
        on_token: Callable[[int], bool] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        options: TokenOptions | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = RowSampling(sampling, row=row)
        self.most = sampling.max_new_tokens
        self.adapter = adapter
        self.cancellable = is_cancelled is not None
        self.is_cancelled = is_cancelled or (lambda: False)
        self.result = Generated()
        self.done = False
        self.error: BaseException | None = None
        self.launched = 0
        """Tokens that are computed or being computed; a card runs ahead of what is known here."""
        self._on_token = on_token
        self.options = options

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what is computed behind it, but the newest: its keys come next."""
        return len(self.prompt) + self.launched - 1

    @property
    def final_length(self) -> int:
        return len(self.prompt) + self.most

    def take(self, token: int, stop: frozenset[int]) -> bool:
        """The next token; whether the answer ended now: at a stop token, the limit, or by its listener."""
        if self.done:
            return False
        if self.options is not None and self.options.constraint is not None:
            self.options.constraint.advance(token)
        if token in stop:
            self.end("stop")
            return True
        self.result.tokens.append(token)
        if self._on_token is not None and not self._on_token(token):
            self.end("stop")
        elif len(self.result.tokens) >= self.most:
            self.end("length")
        return self.done

    def end(self, reason: Literal["stop", "length"], error: BaseException | None = None) -> None:
        self.result.finish_reason = reason
        self.done, self.error = True, error
