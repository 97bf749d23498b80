"""The interface of an inference engine.

Input: conversations, how to decode, which adapter. Output: answers with their token counts. Evaluation uses
it, and through a process of its own (`local`) repairs and components. Knows neither cases nor HTTP nor torch.

To add an engine: implement `MeasuringEngine` in a file of its own and name it in `local.open_engine`, or in
an installed package under the entry point group `graftwork.engines` (a callable that takes an EngineSource).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from graftwork.records.interaction import Message

OnToken = Callable[[int, int], bool]
"""Called with (row, token) for each new token of a batch; False ends that row."""


class EngineSource(NamedTuple):
    """What an engine for local weights loads. `fingerprint` identifies base and adapter together."""

    base_folder: Path
    adapters: Mapping[str, Path] = {}
    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None
    reasoning: bool = True
    fingerprint: str = ""
    rows: int | None = None
    """Most answers that are generated at once; None: as many as fit."""


class DecodingSettings(NamedTuple):
    """Temperature 0 is greedy; `top_k` 0 keeps all tokens. Without a seed, none is sent to an endpoint."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    top_k: int = 0


class RenderedPrompt(NamedTuple):
    """A conversation as an engine reads it."""

    messages: tuple[Message, ...]
    tokens: list[int]


class EngineReply(NamedTuple):
    """`seconds` and `first_token_seconds` are known if a prompt was answered alone."""

    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    first_token_seconds: float | None = None
    seconds: float | None = None


class EngineFacts(NamedTuple):
    """Facts about the engine. `details` goes into reports."""

    name: str
    precision: str
    fingerprint: str
    details: Mapping[str, Any]


class Timing(NamedTuple):
    """One request alone: seconds to the first token, if known, and to the last."""

    first_token: float | None
    total: float


class EngineUnavailable(Exception):
    """The engine did not answer, and another attempt right now would not help; `attempts` were made."""

    def __init__(self, why: str, *, attempts: int = 1) -> None:
        super().__init__(why)
        self.attempts = attempts


class MeasuringEngine(Protocol):
    """An engine for local weights, whose cost and losses can be measured.

    `adapter` names one of `adapters`; None asks the base.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def adapters(self) -> tuple[str, ...]: ...

    def render(self, messages: tuple[Message, ...]) -> RenderedPrompt:
        """Render the conversation as the engine will read it."""
        ...

    def answer(
        self,
        prompts: Sequence[RenderedPrompt],
        decoding: DecodingSettings,
        *,
        adapter: str | None = None,
        on_token: OnToken | None = None,
    ) -> list[EngineReply]:
        """Answer a batch, in its order. The same batch and seed give the same answers."""
        ...

    def close(self) -> None: ...

    def load_adapter(self, name: str, folder: Path) -> None: ...

    def time_one(
        self, prompt: RenderedPrompt, decoding: DecodingSettings, *, adapter: str | None = None
    ) -> Timing:
        """Time one request alone, as a user waits for it."""
        ...

    def reply_losses(
        self, conversations: Sequence[tuple[tuple[Message, ...], str]], *, adapter: str | None = None
    ) -> Sequence[float | None]:
        """The mean loss per token of each reply, its end of turn included; None for one that is refused."""
        ...

    def peak_memory_gib(self) -> float: ...
