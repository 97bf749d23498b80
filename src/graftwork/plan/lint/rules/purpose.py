"""Rules about what the run is for: the model, the proof, the place it runs at, the file itself. Pure."""

import math
from collections.abc import Iterator

from graftwork.plan.lint.counts import count_steps, interval_of
from graftwork.plan.lint.facts import Around, Configuration
from graftwork.plan.lint.rule import LintRule, RuleResult

CONFIDENCE = 0.95


def data_came_from_another(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.model and said.data_model and not same_model(said.model, said.data_model):
        yield RuleResult(
            f"the rows were written by {said.data_model}, and {said.model} is trained on them",
            "this is distillation: the rate that the logs show is the other model's, and its template, "
            "reasoning and tool calls may not be this one's",
            f"measure {said.model} untrained on the held-out rows first, and compare with that",
            ("data_model", "model"),
        )


def another_is_deployed(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.model and said.deployed_model and not same_model(said.model, said.deployed_model):
        yield RuleResult(
            f"the adapter is trained on {said.model}, but {said.deployed_model} is what is served",
            "an adapter fits the very weights that it was trained on; on others it is noise or does not load",
            "train on the model that is served, or serve the one that is trained on",
            ("deployed_model", "model"),
        )


def rate_cannot_be_proven(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.target_rate is None or said.test_rows is None or not 0 < said.target_rate < 1:
        return
    tail = (1 - CONFIDENCE) / 2
    best = tail ** (1 / said.test_rows)
    if best >= said.target_rate:
        return
    needed = math.ceil(math.log(tail) / math.log(said.target_rate))
    yield RuleResult(
        f"{said.test_rows} held-out rows cannot prove {said.target_rate:.1%}",
        f"with every one of them right, the exact 95 % interval still begins at {best:.1%}",
        f"hold out {needed} rows or more, or ask for {math.floor(best * 100)} %",
        ("target_rate", "test_rows"),
    )


def spot_without_checkpoints(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if not said.spot:
        return
    steps, every = count_steps(said), interval_of(said.save_when, said.save_steps)
    never = steps is not None and every is not None and every >= steps.total
    if said.save_when == "no" or never:
        yield RuleResult(
            "the place can be taken away at any time, and no checkpoint is made before the end",
            "each interruption starts the run from nothing",
            "save every few minutes: `graft plan compare` reckons the best interval for the place",
            ("save_steps", "save_when", "spot"),
        )


def spot_without_mirror(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.spot and said.mirror is None:
        yield RuleResult(
            "the place can be taken away at any time, and checkpoints stay on its own disk",
            "with the machine its disk can go, and the checkpoints with it",
            "copy them out as they are made (`train.run.mirror: s3://…` in graft.yaml)",
            ("spot",),
        )


def deadline_comes_first(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.deadline_minutes is None or said.expected_minutes is None:
        return
    if said.expected_minutes > said.deadline_minutes:
        yield RuleResult(
            f"the run takes {_hours(said.expected_minutes)} {_by(said)}, and the place is gone after "
            f"{_hours(said.deadline_minutes)}",
            "it needs several sessions: each ends with a checkpoint and begins with it, or starts over",
            "resume from a mirror in the next session, train on fewer rows, or take a longer session",
            ("deadline_minutes", "expected_minutes"),
        )


def template_was_not_filled_in(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    for key, value in said.unfilled.items():
        yield RuleResult(
            f"{key} still holds the placeholder {value!r}",
            "it is taken as it stands, and fails when it is first used, maybe at the end of the run",
            "fill it in, or remove it",
            (f"={key}",),
        )


def number_is_a_text(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    for key, value in said.texts_for_numbers.items():
        mantissa, exponent = value.lower().split("e")
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        sign = exponent if exponent[0] in "+-" else f"+{exponent}"
        yield RuleResult(
            f"{key}: {value} is a text to YAML 1.1, not a number",
            "PyYAML wants a point and a sign; a script that does not convert it fails when it compares",
            f"write {mantissa}e{sign}",
            (f"={key}",),
        )


def same_model(one: str, other: str) -> bool:
    """By the last part of the name: an organisation before it, case and underscores do not matter."""

    def plain(name: str) -> str:
        return name.rstrip("/").split("/")[-1].lower().replace("_", "-")

    return plain(one) == plain(other)


def _by(said: Configuration) -> str:
    return "as is said" if "expected_minutes" in said.places else "or more, as reckoned"


def _hours(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"


PURPOSE_RULES = (
    LintRule("data-from-another-model", "warning", "rows that another model wrote", data_came_from_another),
    LintRule(
        "another-is-deployed", "error", "an adapter for another model than is served", another_is_deployed
    ),
    LintRule(
        "rate-cannot-be-proven",
        "warning",
        "a goal that so few held-out rows cannot show",
        rate_cannot_be_proven,
        "exact binomial interval (Clopper and Pearson 1934), all cases right",
    ),
    LintRule("spot-without-checkpoints", "error", "a spot place and nothing saved", spot_without_checkpoints),
    LintRule(
        "spot-without-mirror", "warning", "a spot place and checkpoints on its disk", spot_without_mirror
    ),
    LintRule("deadline-comes-first", "error", "a session shorter than the run", deadline_comes_first),
    LintRule("placeholder", "error", "a value of a template", template_was_not_filled_in),
    LintRule("number-is-a-text", "warning", "2e-4, which YAML 1.1 reads as a text", number_is_a_text),
)
