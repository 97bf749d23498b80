"""Rules about counting: rows of a step, steps of an epoch and of a run. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.counts import count_steps, effective_batch
from graftwork.plan.lint.facts import Around, Configuration
from graftwork.plan.lint.rule import LintRule, RuleResult


def batch_is_not_as_stated(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    batch = effective_batch(said)
    if said.micro_batch is None or said.stated_batch is None or said.stated_batch == batch:
        return
    yield RuleResult(
        f"the effective batch is {_product(said)} = {batch}, not {said.stated_batch}",
        "the learning rate, the steps of an epoch and the comparison with earlier runs hang on it",
        _fix_accumulation(said, said.stated_batch),
        ("stated_batch", "accumulation", "micro_batch"),
    )


def batch_contradicts_itself(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.kind != "deepspeed" or None in (said.batch, said.micro_batch, said.accumulation):
        return
    assert said.batch is not None
    each = (said.micro_batch or 1) * (said.accumulation or 1)
    if said.cards is None and said.batch % each == 0:
        return
    if said.batch == each * (said.cards or 1):
        return
    yield RuleResult(
        f"train_batch_size is {said.batch}, but {_product(said)} = {each * (said.cards or 1)}",
        "DeepSpeed refuses to start unless they agree for the cards that are there",
        _fix_accumulation(said, said.batch),
        ("batch", "accumulation"),
    )


def batch_does_not_divide(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    cards, batch = said.cards or 1, said.batch or said.stated_batch
    if cards < 2 or batch is None or batch % cards == 0:
        return
    yield RuleResult(
        f"{batch} rows a step do not divide by {cards} cards",
        "some cards get a row more than others and the rest wait for them in every step",
        f"take {batch // cards * cards or cards} or {(batch // cards + 1) * cards} rows a step",
        ("batch", "stated_batch", "cards"),
    )


def batch_is_larger_than_the_data(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    batch = effective_batch(said)
    if said.rows is not None and batch is not None and batch > said.rows:
        yield RuleResult(
            f"{batch} rows a step, but there are {said.rows}",
            "every epoch is one smaller step, and rates for the batch that is set do not fit it",
            f"at most {max(said.rows // 10, 1)} rows a step gives ten steps an epoch",
            ("stated_batch", "batch", "accumulation", "micro_batch"),
        )


def max_steps_win(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps = count_steps(said.model_copy(update={"max_steps": None}))
    if said.max_steps is None or said.epochs is None or said.kind == "deepspeed":
        return
    if steps is not None and steps.total == said.max_steps:
        return
    by_epochs = f"; {said.epochs:g} epochs would be {steps.total} steps" if steps else ""
    yield RuleResult(
        f"max_steps {said.max_steps} is set, so the {said.epochs:g} epochs are ignored",
        f"transformers takes the steps where both are said{by_epochs}",
        "keep one of the two",
        ("max_steps",),
    )


def epoch_steps_are_not_as_stated(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps = count_steps(said)
    stated = said.stated_epoch_steps
    if steps is None or steps.epoch is None or stated is None or abs(stated - steps.epoch) <= 1:
        return
    yield RuleResult(
        f"an epoch has {steps.epoch} steps, not {stated}",
        f"{said.rows} rows / {effective_batch(said)} rows a step; warm-up, intervals and hours were set for "
        f"{stated / steps.epoch:.1f} times as many",
        f"reckon with {steps.epoch} steps an epoch",
        ("stated_epoch_steps",),
    )


def steps_are_not_as_stated(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps, stated = count_steps(said), said.stated_steps
    if steps is None or stated is None or abs(stated - steps.total) <= max(1, 0.05 * steps.total):
        return
    yield RuleResult(
        f"the run has {steps.total} steps, not {stated}",
        "whatever was set in steps (warm-up, checkpoints, evaluations) was set for another run",
        f"set it for {steps.total} steps",
        ("stated_steps",),
    )


def _product(said: Configuration) -> str:
    cards = f" × {said.cards} cards" if said.cards else ""
    return f"{said.micro_batch} × {said.accumulation or 1}{cards}"


def _fix_accumulation(said: Configuration, wanted: int) -> str:
    each = (said.micro_batch or 1) * (said.cards or 1)
    if wanted % each == 0:
        return f"accumulate {wanted // each} times for {wanted}, or say {effective_batch(said)}"
    near = max(round(wanted / each), 1)
    return (
        f"{wanted} cannot be made of {each} rows at a time; {near * each} can, by accumulating {near} times"
    )


BATCH_RULES = (
    LintRule(
        "batch-not-as-stated", "error", "micro × accumulation × cards, said otherwise", batch_is_not_as_stated
    ),
    LintRule(
        "batch-contradicts-itself",
        "error",
        "DeepSpeed's three batch figures that do not agree",
        batch_contradicts_itself,
        "DeepSpeed configuration, batch size related parameters",
    ),
    LintRule(
        "batch-larger-than-data",
        "warning",
        "a step of more rows than there are",
        batch_is_larger_than_the_data,
    ),
    LintRule("max-steps-win", "note", "epochs that steps overrule", max_steps_win),
    LintRule(
        "batch-does-not-divide", "warning", "rows that cards cannot share evenly", batch_does_not_divide
    ),
    LintRule(
        "epoch-steps-not-as-stated", "error", "steps an epoch, said otherwise", epoch_steps_are_not_as_stated
    ),
    LintRule("steps-not-as-stated", "error", "steps of the run, said otherwise", steps_are_not_as_stated),
)
