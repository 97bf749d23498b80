"""Rules about the course of a run: steps and schedules, batches, checkpoints and evaluations.

Input: a configuration and its context. Output: findings. Pure.
"""

from collections.abc import Iterator

from graftwork.plan.lint.configuration import (
    Configuration,
    LintContext,
    RuleHit,
    count_steps,
    effective_batch,
    interval_of,
    rule,
    warmup_of,
)

LARGE_WARMUP = 0.2
FEW_STEPS = 100
TRAINER = "transformers TrainingArguments and EarlyStoppingCallback, 5.22"
ASKS_FOR_EVALUATION = ("training", "llama-factory")
"""Kinds where an interval by itself does not turn evaluation on."""


@rule("warmup-outlasts-run", "error")
def warmup_outlasts_run(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A warm-up as long as the run."""
    steps = count_steps(config)
    warmup = warmup_of(config, steps.total) if steps else None
    if steps is None or warmup is None or warmup < steps.total:
        return
    reached = steps.total / warmup
    yield RuleHit(
        f"the warm-up of {warmup} steps is as long as the run of {steps.total} or longer",
        f"the learning rate rises to {reached:.0%} of its setting and never falls: there is no decay",
        f"warm up for {max(round(steps.total * 0.05), 1)} to {max(round(steps.total * 0.1), 1)} steps",
        ("warmup_steps", "warmup_ratio"),
    )


@rule("warmup-large-share", "warning")
def warmup_large_share(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A warm-up of more than a fifth."""
    steps = count_steps(config)
    warmup = warmup_of(config, steps.total) if steps else None
    if steps is None or warmup is None or not LARGE_WARMUP * steps.total < warmup < steps.total:
        return
    yield RuleHit(
        f"the warm-up takes {warmup} of {steps.total} steps ({warmup / steps.total:.0%})",
        "that much of the run is trained at a lower rate than is set",
        f"3 to 10 % is usual: {max(round(steps.total * 0.05), 1)} steps here",
        ("warmup_steps", "warmup_ratio"),
    )


@rule("checkpoint-never-comes", "error")
def checkpoint_never_comes(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """An interval longer than the run."""
    steps, every = count_steps(config), interval_of(config.save_when, config.save_steps)
    if steps is None or every is None or every < steps.total:
        return
    if config.kind == "graft" and "save_steps" not in config.places:
        # Our own interval, on a run so short that little is lost.
        return
    end = "only the last step is saved" if config.kind != "deepspeed" else "nothing is saved"
    yield RuleHit(
        f"a checkpoint every {every} steps, but the run has {steps.total}",
        f"{end}: whatever ends the run before that loses all of it",
        f"save every {max(steps.total // 5, 1)} steps or more often",
        ("save_steps", "save_when"),
    )


@rule("saving-is-off", "warning")
def saving_is_off(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A run that saves nothing."""
    if config.save_when == "no":
        yield RuleHit(
            "no checkpoint is ever written",
            "a crash, a full disk or a closed session loses the whole run",
            "save by steps, and resume from the last checkpoint",
            ("save_when",),
        )


@rule("evaluation-never-happens", "error")
def evaluation_never_happens(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """An evaluation interval longer than the run."""
    steps, every = count_steps(config), interval_of(config.eval_when, config.eval_steps)
    if steps is None or every is None or every < steps.total:
        return
    yield RuleHit(
        f"an evaluation every {every} steps, but the run has {steps.total}",
        "at most the end is measured: there is no curve to stop by and no best model to choose",
        f"evaluate every {max(steps.total // 5, 1)} steps",
        ("eval_steps", "eval_when"),
    )


@rule("evaluation-not-switched-on", "error", TRAINER)
def evaluation_not_switched_on(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """An interval whose strategy is `no`."""
    if config.kind in ASKS_FOR_EVALUATION and config.eval_steps and config.eval_when in (None, "no"):
        yield RuleHit(
            f"an interval of {config.eval_steps} steps is set, but evaluation is not switched on",
            "the strategy is `no` unless it is set; the interval alone does nothing",
            "set `eval_strategy: steps`",
            ("eval_steps",),
        )


@rule("stop-without-evaluation", "error", TRAINER)
def stop_without_evaluation(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Early stopping that sees no figure."""
    if config.stops_early and not _evaluates(config):
        yield RuleHit(
            "early stopping is set, but nothing is evaluated during the run",
            "there is no figure to stop by; transformers refuses to start so",
            "set `eval_strategy: steps` and an interval well below the length of the run",
            ("stops_early",),
        )


@rule("stop-without-metric", "error", TRAINER)
def stop_without_metric(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Early stopping without a metric."""
    foreign = config.kind != "graft"
    if (
        foreign
        and config.stops_early
        and _evaluates(config)
        and config.best_metric is None
        and not config.keep_best
    ):
        yield RuleHit(
            "early stopping is set, but no metric to stop by",
            "the callback asserts `metric_for_best_model`, which is `loss` only with load_best_model_at_end",
            "set `metric_for_best_model: eval_loss` and `load_best_model_at_end: true`",
            ("stops_early",),
        )


@rule("best-without-evaluation", "error", TRAINER)
def best_without_evaluation(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A best model that nothing measures."""
    if config.keep_best and not _evaluates(config):
        yield RuleHit(
            "the best model is to be loaded at the end, but nothing is evaluated",
            "no checkpoint has a figure to be the best by; transformers refuses to start so",
            "set `eval_strategy` as `save_strategy` is set",
            ("keep_best",),
        )


@rule("best-off-the-grid", "error", TRAINER)
def best_off_the_grid(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Checkpoints between two evaluations."""
    if not config.keep_best or not _evaluates(config) or config.save_when == "best":
        return
    saved, evaluated = config.save_when or "steps", config.eval_when or "steps"
    if saved != evaluated:
        yield RuleHit(
            f"the best model is to be loaded, but it is saved by {saved} and evaluated by {evaluated}",
            "the model that was best is not the one that was saved",
            "use the same strategy for both",
            ("save_when", "eval_when", "keep_best"),
        )
    elif (
        saved == "steps" and config.save_steps and config.eval_steps and config.save_steps % config.eval_steps
    ):
        yield RuleHit(
            f"checkpoints every {config.save_steps} steps are not on the grid of evaluations "
            f"every {config.eval_steps}",
            "a checkpoint without a figure cannot be the best one; transformers refuses to start so",
            f"save every {config.eval_steps} steps or a multiple of it, or evaluate as often as is saved",
            ("save_steps", "eval_steps"),
        )


@rule("few-steps", "note")
def few_steps(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A run of fewer than a hundred updates."""
    steps = count_steps(config)
    if steps is not None and config.max_steps is None and steps.total < FEW_STEPS:
        yield RuleHit(
            f"the run has {steps.total} updates in all",
            "that few leave little room to learn; intervals made for long runs do not fit it",
            "a smaller batch gives more updates of the same rows; set all intervals for this length",
            ("epochs", "rows"),
        )


def _evaluates(config: Configuration) -> bool:
    if config.kind in ASKS_FOR_EVALUATION:
        return config.eval_when not in (None, "no")
    return config.eval_when not in (None, "no") or config.eval_steps is not None


@rule("batch-not-as-stated", "error")
def batch_is_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A batch that is not micro × accumulation × GPUs."""
    batch = effective_batch(config)
    if config.micro_batch is None or config.stated_batch is None or config.stated_batch == batch:
        return
    yield RuleHit(
        f"the effective batch is {_product(config)} = {batch}, not {config.stated_batch}",
        "the learning rate, the steps of an epoch and the comparison with earlier runs depend on it",
        _fix_accumulation(config, config.stated_batch),
        ("stated_batch", "accumulation", "micro_batch"),
    )


@rule("batch-contradicts-itself", "error", "DeepSpeed configuration, batch size related parameters")
def batch_contradicts_itself(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """DeepSpeed's three batch figures that do not agree."""
    if config.kind != "deepspeed" or None in (config.batch, config.micro_batch, config.accumulation):
        return
    assert config.batch is not None
    rows_per_gpu = (config.micro_batch or 1) * (config.accumulation or 1)
    if config.gpus is None and config.batch % rows_per_gpu == 0:
        return
    if config.batch == rows_per_gpu * (config.gpus or 1):
        return
    yield RuleHit(
        f"train_batch_size is {config.batch}, but {_product(config)} = {rows_per_gpu * (config.gpus or 1)}",
        "DeepSpeed refuses to start unless they agree for the GPUs that are there",
        _fix_accumulation(config, config.batch),
        ("batch", "accumulation"),
    )


@rule("batch-larger-than-data", "warning")
def batch_is_larger_than_the_data(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A step of more rows than there are."""
    batch = effective_batch(config)
    if config.rows is not None and batch is not None and batch > config.rows:
        yield RuleHit(
            f"{batch} rows per step, but there are {config.rows}",
            "every epoch is one smaller step, and rates for the batch that is set do not fit it",
            f"at most {max(config.rows // 10, 1)} rows a step gives ten steps an epoch",
            ("stated_batch", "batch", "accumulation", "micro_batch"),
        )


@rule("max-steps-win", "note")
def max_steps_win(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Epochs that steps overrule."""
    steps = count_steps(config.model_copy(update={"max_steps": None}))
    if config.max_steps is None or config.epochs is None or config.kind == "deepspeed":
        return
    if steps is not None and steps.total == config.max_steps:
        return
    by_epochs = f"; {config.epochs:g} epochs would be {steps.total} steps" if steps else ""
    yield RuleHit(
        f"max_steps {config.max_steps} is set, so the {config.epochs:g} epochs are ignored",
        f"transformers uses the steps where both are set{by_epochs}",
        "keep one of the two",
        ("max_steps",),
    )


@rule("batch-does-not-divide", "warning")
def batch_does_not_divide(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Rows that GPUs cannot share evenly."""
    gpus, batch = config.gpus or 1, config.batch or config.stated_batch
    if gpus < 2 or batch is None or batch % gpus == 0:
        return
    yield RuleHit(
        f"{batch} rows a step do not divide by {gpus} GPUs",
        "some GPUs get a row more than others and the rest wait for them in every step",
        f"take {batch // gpus * gpus or gpus} or {(batch // gpus + 1) * gpus} rows per step",
        ("batch", "stated_batch", "gpus"),
    )


@rule("epoch-steps-not-as-stated", "error")
def epoch_steps_are_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A wrong number of steps per epoch."""
    steps = count_steps(config)
    stated = config.stated_epoch_steps
    if steps is None or steps.epoch is None or stated is None or abs(stated - steps.epoch) <= 1:
        return
    yield RuleHit(
        f"an epoch has {steps.epoch} steps, not {stated}",
        f"{config.rows} rows / {effective_batch(config)} rows per step; warm-up, intervals and "
        f"hours assume {stated / steps.epoch:.1f} times as many",
        f"expect {steps.epoch} steps an epoch",
        ("stated_epoch_steps",),
    )


@rule("steps-not-as-stated", "error")
def steps_are_not_as_stated(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """A wrong number of steps of the run."""
    steps, stated = count_steps(config), config.stated_steps
    if steps is None or stated is None or abs(stated - steps.total) <= max(1, 0.05 * steps.total):
        return
    yield RuleHit(
        f"the run has {steps.total} steps, not {stated}",
        "whatever was set in steps (warm-up, checkpoints, evaluations) was set for another run",
        f"set it for {steps.total} steps",
        ("stated_steps",),
    )


def _product(config: Configuration) -> str:
    gpus = f" × {config.gpus} GPUs" if config.gpus else ""
    return f"{config.micro_batch} × {config.accumulation or 1}{gpus}"


def _fix_accumulation(config: Configuration, target: int) -> str:
    rows_per_pass = (config.micro_batch or 1) * (config.gpus or 1)
    if target % rows_per_pass == 0:
        return f"accumulate {target // rows_per_pass} times for {target}, or say {effective_batch(config)}"
    near = max(round(target / rows_per_pass), 1)
    return (
        f"{target} cannot be made of {rows_per_pass} rows at a time; {near * rows_per_pass} can, by "
        f"accumulating {near} times"
    )
