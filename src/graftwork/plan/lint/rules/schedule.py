"""Rules about time: warm-up, checkpoints, evaluations, early stopping. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.counts import count_steps, interval_of, warmup_of
from graftwork.plan.lint.facts import Around, Configuration
from graftwork.plan.lint.rule import LintRule, RuleResult

LARGE_WARMUP = 0.2
FEW_STEPS = 100
TRAINER = "transformers TrainingArguments and EarlyStoppingCallback, 5.22"
ASKS_FOR_EVALUATION = ("training", "llama-factory")
"""Kinds where an interval alone switches no evaluation on."""


def warmup_outlasts_run(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps = count_steps(said)
    warmup = warmup_of(said, steps.total) if steps else None
    if steps is None or warmup is None or warmup < steps.total:
        return
    reached = steps.total / warmup
    yield RuleResult(
        f"the warm-up of {warmup} steps is as long as the run of {steps.total} or longer",
        f"the rate rises to {reached:.0%} of what is set and never falls: the schedule does not happen",
        f"warm up for {max(round(steps.total * 0.05), 1)} to {max(round(steps.total * 0.1), 1)} steps",
        ("warmup_steps", "warmup_share"),
    )


def warmup_large_share(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps = count_steps(said)
    warmup = warmup_of(said, steps.total) if steps else None
    if steps is None or warmup is None or not LARGE_WARMUP * steps.total < warmup < steps.total:
        return
    yield RuleResult(
        f"the warm-up takes {warmup} of {steps.total} steps ({warmup / steps.total:.0%})",
        "that much of the run is trained at a lower rate than is set",
        f"3 to 10 % is usual: {max(round(steps.total * 0.05), 1)} steps here",
        ("warmup_steps", "warmup_share"),
    )


def checkpoint_never_comes(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps, every = count_steps(said), interval_of(said.save_when, said.save_steps)
    if steps is None or every is None or every < steps.total:
        return
    if said.kind == "graft" and "save_steps" not in said.places:
        # Our own interval, on a run so short that little is lost.
        return
    end = "only the last step is saved" if said.kind != "deepspeed" else "nothing is saved"
    yield RuleResult(
        f"a checkpoint every {every} steps, but the run has {steps.total}",
        f"{end}: whatever ends the run before that loses all of it",
        f"save every {max(steps.total // 5, 1)} steps or more often",
        ("save_steps", "save_when"),
    )


def saving_is_off(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.save_when == "no":
        yield RuleResult(
            "no checkpoint is ever written",
            "a crash, a full disk or a closed session loses the whole run",
            "save by steps, and resume from the last checkpoint",
            ("save_when",),
        )


def evaluation_never_happens(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps, every = count_steps(said), interval_of(said.eval_when, said.eval_steps)
    if steps is None or every is None or every < steps.total:
        return
    yield RuleResult(
        f"an evaluation every {every} steps, but the run has {steps.total}",
        "at most the end is measured: there is no curve to stop by and no best model to choose",
        f"evaluate every {max(steps.total // 5, 1)} steps",
        ("eval_steps", "eval_when"),
    )


def evaluation_not_switched_on(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.kind in ASKS_FOR_EVALUATION and said.eval_steps and said.eval_when in (None, "no"):
        yield RuleResult(
            f"an interval of {said.eval_steps} steps is set, but evaluation is not switched on",
            "the strategy is `no` unless it is set; the interval alone does nothing",
            "set `eval_strategy: steps`",
            ("eval_steps",),
        )


def stop_without_evaluation(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.stops_early and not _evaluates(said):
        yield RuleResult(
            "early stopping is set, but nothing is evaluated during the run",
            "there is no figure to stop by; transformers refuses to start so",
            "set `eval_strategy: steps` and an interval well below the length of the run",
            ("stops_early",),
        )


def stop_without_metric(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    foreign = said.kind != "graft"
    if foreign and said.stops_early and _evaluates(said) and said.best_metric is None and not said.keep_best:
        yield RuleResult(
            "early stopping is set, but no metric to stop by",
            "the callback asserts `metric_for_best_model`, which is `loss` only with load_best_model_at_end",
            "set `metric_for_best_model: eval_loss` and `load_best_model_at_end: true`",
            ("stops_early",),
        )


def best_without_evaluation(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.keep_best and not _evaluates(said):
        yield RuleResult(
            "the best model is to be loaded at the end, but nothing is evaluated",
            "no checkpoint has a figure to be the best by; transformers refuses to start so",
            "set `eval_strategy` as `save_strategy` is set",
            ("keep_best",),
        )


def best_off_the_grid(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if not said.keep_best or not _evaluates(said) or said.save_when == "best":
        return
    saved, evaluated = said.save_when or "steps", said.eval_when or "steps"
    if saved != evaluated:
        yield RuleResult(
            f"the best model is to be loaded, but it is saved by {saved} and evaluated by {evaluated}",
            "the model that was best is not the one that was saved",
            "use the same strategy for both",
            ("save_when", "eval_when", "keep_best"),
        )
    elif saved == "steps" and said.save_steps and said.eval_steps and said.save_steps % said.eval_steps:
        yield RuleResult(
            f"checkpoints every {said.save_steps} steps are not on the grid of evaluations "
            f"every {said.eval_steps}",
            "a checkpoint without a figure cannot be the best one; transformers refuses to start so",
            f"save every {said.eval_steps} steps or a multiple of it, or evaluate as often as is saved",
            ("save_steps", "eval_steps"),
        )


def few_steps(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    steps = count_steps(said)
    if steps is not None and said.max_steps is None and steps.total < FEW_STEPS:
        yield RuleResult(
            f"the run has {steps.total} updates in all",
            "that few leave little room to learn; intervals made for long runs do not fit it",
            "a smaller batch gives more updates of the same rows; set all intervals for this length",
            ("epochs", "rows"),
        )


def _evaluates(said: Configuration) -> bool:
    if said.kind in ASKS_FOR_EVALUATION:
        return said.eval_when not in (None, "no")
    return said.eval_when not in (None, "no") or said.eval_steps is not None


SCHEDULE_RULES = (
    LintRule("warmup-outlasts-run", "error", "a warm-up as long as the run", warmup_outlasts_run),
    LintRule("warmup-large-share", "warning", "a warm-up of more than a fifth", warmup_large_share),
    LintRule("checkpoint-never-comes", "error", "an interval longer than the run", checkpoint_never_comes),
    LintRule("saving-is-off", "warning", "a run that saves nothing", saving_is_off),
    LintRule(
        "evaluation-never-happens",
        "error",
        "an evaluation interval longer than the run",
        evaluation_never_happens,
    ),
    LintRule(
        "evaluation-not-switched-on",
        "error",
        "an interval whose strategy is `no`",
        evaluation_not_switched_on,
        TRAINER,
    ),
    LintRule(
        "stop-without-evaluation",
        "error",
        "early stopping that sees no figure",
        stop_without_evaluation,
        TRAINER,
    ),
    LintRule("stop-without-metric", "error", "early stopping without a metric", stop_without_metric, TRAINER),
    LintRule(
        "best-without-evaluation",
        "error",
        "a best model that nothing measures",
        best_without_evaluation,
        TRAINER,
    ),
    LintRule("best-off-the-grid", "error", "checkpoints between two evaluations", best_off_the_grid, TRAINER),
    LintRule("few-steps", "note", "a run of fewer than a hundred updates", few_steps),
)
