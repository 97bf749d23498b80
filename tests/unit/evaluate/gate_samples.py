"""Reports made of marks: what the tests of the gate judge."""

from statistics import median

from graftwork.evaluate.comparison import compare
from graftwork.evaluate.report import make_metric
from graftwork.evaluate.statistics.intervals import quantile_interval
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Answer, Case, Generation, Metric, Report, SubjectReport
from graftwork.records.run import TrainingEvaluation, TrainOutcome, TrainStep


def new_case(name, question, reference="r", **more):
    """A case of one question."""
    fields = {"origin": Origin(file="log.jsonl", line=1), "reference": reference, **more}
    return Case(id=name, messages=(Message(role="user", content=question),), **fields)


def new_answer(case_id, text, **more):
    fields = {"tokens": 1, "prompt_tokens": 1, "finish_reason": "stop", "seconds": 1, **more}
    return Answer(case_id=case_id, text=text, **fields)


def new_generation(subject, **more):
    figures = {"answers": 1, "seconds": 1, "tokens_per_second": 1, "peak_memory_gib": 1}
    return Generation(**{"subject": subject, **figures, "single_latency_seconds": (), "settings": {}, **more})


def marks(successes, n):
    return [1] * successes + [0] * (n - successes)


def number(name, value, low=None, high=None, n=1, unit=""):
    low, high = value if low is None else low, value if high is None else high
    return Metric(name=name, kind="number", value=value, low=low, high=high, n=n, unit=unit)


def subject(name, grades, *, latency=(), memory=None, speed=1.0, first_token=(), sessions=None):
    """`grades` maps a metric to one mark a case; None where it does not apply."""
    metrics = {}
    for metric, values in grades.items():
        scores = {f"c{i}": None if mark is None else float(mark) for i, mark in enumerate(values)}
        metrics[metric] = make_metric(metric, scores=scores, sessions=sessions)
    for timed, seconds in (("latency_seconds", latency), ("first_token_seconds", first_token)):
        if seconds:
            low, high = quantile_interval(seconds, quantile=0.5, confidence=0.95)
            metrics[timed] = number(timed, median(seconds), low, high, n=len(seconds), unit="s")
    metrics["tokens_per_second"] = number("tokens_per_second", speed, unit="tokens/s")
    if memory is not None:
        metrics["peak_memory_gib"] = number("peak_memory_gib", memory, unit="GiB")
    generation = Generation(
        subject=name,
        answers=1,
        seconds=1,
        tokens_per_second=speed,
        single_latency_seconds=tuple(latency),
        peak_memory_gib=memory or 0.0,
        settings={},
        first_token_seconds=tuple(first_token),
    )
    return SubjectReport(subject=name, metrics=metrics, generation=generation)


def report(
    candidate, baseline, *, others=(), champion=None, sessions=None, groups=None, looks=1, settings=None
):
    cases = max((len(m.scores) for m in candidate.metrics.values()), default=0)
    return Report(
        cases_hash="cases",
        cases=cases,
        baseline=baseline,
        candidate=candidate,
        comparisons=compare(baseline, candidate=candidate, sessions=sessions or {}),
        others=tuple(others),
        champion=champion,
        sessions=sessions or {},
        groups=groups or {},
        looks=looks,
        settings=settings or {},
    )


def simple(before, after, *, metric="json_valid", **more):
    return report(subject("adapter", {metric: after}), subject("base", {metric: before}), **more)


def steps(losses, *, gradient_norms=None):
    return tuple(
        TrainStep(
            step=place + 1,
            loss=loss,
            learning_rate=1e-3,
            gradient_norm=gradient_norms[place] if gradient_norms else 1.0,
            tokens=1,
            trained_tokens=1,
            seconds=1,
        )
        for place, loss in enumerate(losses)
    )


def outcome(losses, *, before=2.0, after=1.0, looks=(), best_step=None, settings=None, **more):
    made = [TrainingEvaluation(step=s, metric="loss", value=v, cases=8, seconds=1) for s, v in looks]
    fields = {
        "run_id": "run",
        "adapter_folder": "adapter",
        "adapter_hash": "a" * 64,
        "base_hash_before": "b",
        "base_hash_after": "b",
        "steps": len(losses),
        "epochs": 2,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "validation_loss_before": before,
        "validation_loss_after": after,
        "seconds": 1,
        "load_seconds": 1,
        "tokens_per_second": 1,
        "peak_memory_gib": 1,
        "trainable_parameters": 1,
        "restarts": 0,
        "replayed_steps": 0,
        "replay_identical": None,
        "looks": tuple(made),
        "best_step": best_step,
        "settings": settings or {"epochs": 2, "learning_rate": 1e-3},
    }
    return TrainOutcome(**{**fields, **more})
