"""Questions about serving and their answers. Records only.

A question holds facts: the model's shape, the machine's figures, the load. It does not know where they
were read. Every figure of an answer has a range.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Figure, Record
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape

Form = Literal["32 bits", "16 bits", "8 bits", "4 bits"]
"""How many bits a weight of a block takes, in round figures; `engines.py` has the exact ones."""
EngineName = Literal["vllm", "llama.cpp", "embedded"]
Word = Literal["yes", "likely", "unlikely", "no"]
"""The whole range is good, the value is, only the better end is, nothing is."""
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ServeLoad(Record):
    """What may be stated about serving: how the model is run, and who asks it how much."""

    engine: str | None = None
    weights: str = "auto"
    adapters: int = 0
    rank: int = 16
    adapter_layers: int | None = None
    """Layers that carry an adapter; None: all."""
    copies: int = 1
    users: int = 1
    context: int = 2048
    answer: int = 500
    prompt: int | None = None
    """All of the context but the answer if it is not stated: nothing is held from before."""
    limit_seconds: float | None = None
    memory_limit_gib: float | None = None


class ServeQuestion(Record):
    """A model, who asks it how much at a time, and what it is to run on."""

    model: str
    doubt: str = ""
    """What is not sure about the shape."""
    shape: ModelShape
    machine: Machine
    engine: EngineName
    form: Form | Literal["auto"] = "auto"
    adapters: int = Field(default=0, ge=0)
    rank: int = Field(default=16, ge=1)
    adapter_layers: int | None = Field(default=None, ge=1)
    targets: tuple[str, ...] = ALL_LINEAR
    copies: int = Field(default=1, ge=1)
    """Whole models, each with weights of its own, that share the machine."""
    users: int = Field(default=1, ge=1)
    """Who wait for an answer at the same time, each asking again at once: the full load."""
    context: int = Field(default=2048, ge=2)
    """Tokens cached for a user: the conversation so far and the answer."""
    answer: int = Field(default=500, ge=1)
    prompt: int = Field(ge=1)
    """Tokens that must be processed for an answer; the rest of the context is cached."""
    limit_seconds: float | None = Field(default=None, gt=0)
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """What serving may take, where that is less than the machine has."""

    @model_validator(mode="after")
    def _context_holds_prompt_and_answer(self) -> Self:
        if self.prompt + self.answer > self.context:
            raise ValueError(
                f"{self.context} tokens of context do not hold {self.prompt} read and {self.answer} written"
            )
        return self

    @property
    def cards(self) -> int:
        return self.machine.gpus if self.machine.gpu is not None else 0


class Latency(Record):
    """How long things take at this load."""

    first_token_alone_seconds: Figure
    """For a single user."""
    first_token_seconds: Figure
    """For the last of all users, when all ask at once."""
    token_seconds: Figure
    """Between two tokens of one answer while all users get theirs."""
    answer_seconds: Figure
    """From question to last token, when all users ask again as soon as they are answered."""
    tokens_per_second: Figure
    """Over all users, prompts being read in between."""
    parts_seconds: dict[str, Figure]
    """Of an answer: reading prompts, then weights, cache, links and steps of all its tokens."""


class Holding(Record):
    """What is held in memory: of one card where there are several, else of the machine."""

    memory_gib: Figure
    available_gib: Figure
    spare_gib: Figure
    """Below nought: what lacks."""
    parts_gib: dict[str, Figure]
    fits: Word


class FormRow(Record):
    """The same question with weights of another width."""

    form: Form
    format: str
    bits: Figure
    """Over all weights."""
    one_model_gib: Figure
    holding: Holding
    latency: Latency
    fits: bool
    meets_limit: Word | None
    """None where no limit was named."""
    chosen: bool = False


class SpecialistRow(Record):
    """How many specialists the machine holds, as whole models and as adapters on one base."""

    form: Form
    one_model_gib: Figure
    one_adapter_gib: Figure
    whole_models: Figure
    adapters: Figure
    asked: int
    asked_whole_gib: Figure
    """What the asked number takes as whole models, all cards together, and as adapters on one base."""
    asked_adapters_gib: Figure


class ServeAnswer(Record):
    """What will happen, the verdict first."""

    verdict: str
    good: bool
    """It fits, and the limit is met where one was named."""
    fits: bool
    meets_limit: bool | None
    certainty: Literal["computed"] = "computed"
    question: ServeQuestion
    weights: Form
    memory_gib: Figure
    available_gib: Figure
    spare_gib: Figure
    parts_gib: dict[str, Figure]
    first_token_alone_seconds: Figure
    first_token_seconds: Figure
    token_seconds: Figure
    answer_seconds: Figure
    tokens_per_second: Figure
    parts_seconds: dict[str, Figure]
    most_users: Figure
    most_users_in_time: Figure | None
    longest_context: Figure
    quantisations: tuple[FormRow, ...]
    specialists: tuple[SpecialistRow, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    """Who says what the machine gives, and what engines reach of it."""


SLOW_SECONDS = 60.0
"""People do not wait longer for an answer."""
READING_SECONDS = 0.2
"""People read some five tokens a second; slower than that and they wait for every token."""


def say_verdict(question: ServeQuestion, row: FormRow) -> str:
    """One sentence: fits or not and by how much, in time or not."""
    held, there = row.holding.memory_gib, row.holding.available_gib.value
    room = f"{held.value:.1f} of {there:.1f} GiB" + (" of each card" if question.cards > 1 else "")
    if not row.fits:
        if row.holding.fits == "likely":
            return f"may not fit: {row.form} take {room}, and up to {held.high:.1f}"
        return f"does not fit: {row.form} take {room}, {-row.holding.spare_gib.value:.1f} GiB too much"
    answer, limit = row.latency.answer_seconds, question.limit_seconds
    taken = f"an answer takes {say_range(answer)}"
    how = f"in {row.form}, with {room}"
    if limit is None:
        slow = answer.value >= SLOW_SECONDS
        return f"fits, but {taken}, which is too slow; {how}" if slow else f"fits, and {taken} {how}"
    if row.meets_limit in ("no", "unlikely"):
        return f"too slow: {taken}, and the limit is {say_seconds(limit)}; {how}"
    met = "is likely to be met" if row.meets_limit == "likely" else "is met"
    return f"fits, and {taken}: the limit of {say_seconds(limit)} {met}; {how}"


def say_range(figure: Figure) -> str:
    return f"{say_seconds(figure.value)} ({say_seconds(figure.low)} … {say_seconds(figure.high)})"


def say_seconds(seconds: float) -> str:
    """In milliseconds, seconds, minutes or hours."""
    if seconds < 0.2:
        return f"{1000 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"
    if seconds < 100:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    if seconds < 5400:
        return f"{seconds / 60:.{0 if seconds >= 597 else 1}f} min"
    return f"{seconds / 3600:.1f} h"
