"""What a generation came to: components, score cards, pass rates by stage, tokens. Read from its journal."""

from collections import defaultdict
from typing import Any

from graftwork.components.generate.attempts import ANSWER, ATTEMPT
from graftwork.components.generate.journal import GenerationJournal
from graftwork.components.generate.score import ScoreCard
from graftwork.records.base import Record


class StageRate(Record):
    """The answers of one stage that were asked without feedback."""

    stage: int
    components: int
    answers: int
    passed: int
    solved: int
    """Components with at least one answer that held every case."""

    @property
    def pass_at_1(self) -> float:
        return self.passed / self.answers if self.answers else 0.0

    @property
    def pass_at_n(self) -> float:
        return self.solved / self.components if self.components else 0.0


class GenerationOutcome(Record):
    """A finished generation."""

    package: str
    out: str
    language: str
    model: str
    built: tuple[str, ...]
    failed: dict[str, str]
    """Components that could not be built, each with stage and reason."""
    cards: tuple[ScoreCard, ...]
    rates: tuple[StageRate, ...]
    answers: int
    verdicts: int
    tokens: int
    journal: str
    skipped: str = ""
    """Why part of the work was not done, such as a language that is not installed."""

    @property
    def ok(self) -> bool:
        return not self.failed and all(card.ok for card in self.cards)


def stage_rates(journal: GenerationJournal) -> tuple[StageRate, ...]:
    first = {entry["key"]: entry for entry in journal.of_kind(ANSWER) if entry["round"] == 0}
    found: dict[int, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for entry in journal.of_kind(ATTEMPT):
        if entry["key"] in first:
            found[entry["stage"]][entry["component"]].append(bool(entry["ok"]))
    return tuple(
        StageRate(
            stage=stage,
            components=len(by_component),
            answers=sum(map(len, by_component.values())),
            passed=sum(map(sum, by_component.values())),
            solved=sum(map(any, by_component.values())),
        )
        for stage, by_component in sorted(found.items())
    )


def spent_tokens(journal: GenerationJournal) -> int:
    return sum(entry["tokens"] + entry["prompt_tokens"] for entry in journal.of_kind(ANSWER))


def compare_rates(before: tuple[StageRate, ...], after: tuple[StageRate, ...]) -> list[dict[str, Any]]:
    """pass@1 by stage of two generations."""
    old, new = ({rate.stage: rate for rate in rates} for rates in (before, after))
    rows = []
    for stage in sorted({*old, *new}):
        first, second = old.get(stage), new.get(stage)
        rows.append(
            {
                "stage": stage,
                "before": round(first.pass_at_1, 4) if first else None,
                "after": round(second.pass_at_1, 4) if second else None,
                "answers_before": first.answers if first else 0,
                "answers_after": second.answers if second else 0,
            }
        )
    return rows
