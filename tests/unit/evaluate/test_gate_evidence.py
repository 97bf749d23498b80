"""A gate without evidence never deploys: held against the statistics themselves, over random reports."""

from gate_samples import marks, number, report, simple, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.rules import Surroundings
from graftwork.evaluate.gate.settings import GateRule, GateSettings, Primary, Win
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.means import paired_difference
from graftwork.evaluate.statistics.significance import mcnemar

METRICS = ("json_valid", "answer_match", "refusal_correct", "truncated")
grades = st.lists(st.sampled_from([0, 1, 1, 1, None]), min_size=0, max_size=90)


@st.composite
def reports(draw):
    n = draw(st.integers(0, 90))
    lucky = draw(st.booleans())

    def one(name):
        measured = draw(st.sets(st.sampled_from(METRICS)))
        mark = st.just(1) if lucky and name == "adapter" else st.sampled_from([0, 1, 1, 1, None])
        rows = {metric: draw(st.lists(mark, min_size=n, max_size=n)) for metric in sorted(measured)}
        latency = draw(st.lists(st.floats(0.1, 9), max_size=9))
        return subject(name, rows, latency=latency, memory=draw(st.one_of(st.none(), st.floats(0.5, 9))))

    others = [one("champion")] if draw(st.booleans()) else []
    others += [one("log")] if draw(st.booleans()) else []
    champion = "champion" if others and others[0].subject == "champion" else None
    return report(one("adapter"), one("base"), others=others, champion=champion)


against = st.sampled_from(["base", "champion", "log"])
margins = st.sampled_from([0.02, 0.1, 0.4])
limits = st.sampled_from([0.3, 0.6, 0.9])
rules = st.one_of(
    st.builds(
        lambda metric, over, severity: GateRule(metric=metric, over=over, severity=severity),
        st.sampled_from(METRICS[:3]),
        limits,
        st.sampled_from(["must", "invariant"]),
    ),
    st.builds(lambda under: GateRule(metric="truncated", under=under), limits),
    st.builds(
        lambda metric, against, margin: GateRule(metric=metric, against=against, margin=margin),
        st.sampled_from(METRICS),
        against,
        margins,
    ),
    st.builds(
        lambda under, at: GateRule(metric="latency_seconds", under=under, at=at),
        st.floats(0.5, 9),
        st.sampled_from([None, "mean", "p95"]),
    ),
    st.builds(lambda most: GateRule(metric="peak_memory_gib", at_most=most), st.floats(0.5, 9)),
)
primaries = st.one_of(st.none(), st.builds(Primary, metric=st.sampled_from(METRICS[:3]), against=against))


def graded(found, name, metric):
    everyone = {item.subject: item for item in (found.baseline, found.candidate, *found.others)}
    if name not in everyone or metric not in everyone[name].metrics:
        return {}
    scores = everyone[name].metrics[metric].scores
    return {case: value for case, value in scores.items() if value is not None}


def counts(found, metric, other):
    """Wins, losses and pairs of the candidate, computed from the marks."""
    before, after = graded(found, other, metric), graded(found, "adapter", metric)
    shared = [case for case in after if case in before]
    sign = -1 if metric == "truncated" else 1
    steps = [sign * (after[case] - before[case]) for case in shared]
    return sum(step > 0 for step in steps), sum(step < 0 for step in steps), len(shared)


def proven(found, rule):
    if rule.margin is not None:
        wins, losses, n = counts(found, rule.metric, rule.against)
        return paired_difference(wins, losses=losses, n=n, sided="lower").low > -rule.margin
    if rule.metric in METRICS:
        marks = graded(found, "adapter", rule.metric).values()
        low, high = clopper_pearson(sum(marks), n=len(marks)) if marks else (0.0, 1.0)
        return low > rule.over if rule.over is not None else high < rule.under
    if rule.metric == "peak_memory_gib":
        memory = found.candidate.metrics.get("peak_memory_gib")
        return memory is not None and memory.value <= rule.at_most
    seconds = found.candidate.generation.single_latency_seconds
    # Nine requests prove no percentile; of a mean or median at least the figure must be kept.
    return bool(seconds) and rule.at != "p95" and min(seconds) < rule.under


@given(reports(), st.lists(rules, min_size=1, max_size=4), primaries, st.booleans())
@settings(max_examples=80, deadline=None)
def test_nothing_is_deployed_that_is_not_proven(found, asked, primary, no_champion):
    chosen = GateSettings(rules=tuple(asked), primary=primary)
    verdict = decide(found, chosen, around=Surroundings(no_champion=no_champion))
    if verdict.decision != "deploy":
        assert verdict.advice
        return
    stood_in = no_champion and found.champion is None

    def other(name):
        return "base" if name == "champion" and stood_in else name

    for rule in asked:
        assert proven(
            found, rule.model_copy(update={"against": other(rule.against)}) if rule.margin else rule
        )
    if primary is not None:
        wins, losses, n = counts(found, primary.metric, other(primary.against))
        assert n > 0
        assert wins > losses
        assert mcnemar(wins, losses=losses) < 0.05
    assert all(rule.outcome == "pass" for rule in verdict.rules if rule.must)


@given(reports(), st.lists(rules, min_size=1, max_size=4), primaries)
@settings(max_examples=40, deadline=None)
def test_each_verdict_gives_figure_interval_limit_and_one_sentence_for_each_rule(found, asked, primary):
    verdict = decide(found, GateSettings(rules=tuple(asked), primary=primary))
    assert len(verdict.rules) >= len(asked)
    for rule in verdict.rules:
        assert rule.sentence.endswith(".")
        assert rule.sentence.count("\n") == 0
        if rule.value is not None:
            assert rule.low is None or rule.low <= rule.value + 1e-9
            assert rule.high is None or rule.value <= rule.high + 1e-9
        if rule.cases_to_decide is not None:
            assert rule.outcome == "unknown"
            assert rule.cases_to_decide > (rule.n or 0)
    assert type(verdict).from_json(verdict.to_json()) == verdict


pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80)


@given(pairs)
def test_the_primary_metric_passes_just_where_mcnemar_decides(found):
    before, after = zip(*found, strict=True)
    wins, losses = sum(new > old for old, new in found), sum(new < old for old, new in found)
    chosen = GateSettings(rules=(GateRule(metric="json_valid", over=0.5),), primary="json_valid")
    primary = decide(simple(before, after), chosen).rules[1]
    assert primary.kind == "primary"
    assert (primary.outcome == "pass") == (wins > losses and mcnemar(wins, losses=losses) < 0.05)


def test_a_report_of_nothing_deploys_nothing():
    empty = report(subject("adapter", {}), subject("base", {}))
    everything = GateSettings(
        rules=(
            GateRule(metric="json_valid", over=0.0),
            GateRule(metric="latency_seconds", under=1e9),
            GateRule(metric="answer_match", against="base", margin=0.9),
        ),
        primary="json_valid",
        win=Win(metric="latency_seconds"),
    )
    verdict = decide(empty, everything)
    assert verdict.decision == "not_enough_evidence"
    assert {rule.outcome for rule in verdict.rules} == {"unknown"}


def test_a_metric_that_applies_to_half_of_the_cases_needs_twice_as_many():
    half = [1 if i % 2 else None for i in range(40)]
    verdict = decide(simple(half, half), GateSettings(rules=(GateRule(metric="json_valid", over=0.9),)))
    assert verdict.rules[0].cases_to_decide == 36
    assert verdict.cases_needed == 72


def test_an_invariant_that_is_broken_for_sure_aborts_whatever_else_is_declared():
    chosen = GateSettings(
        rules=(GateRule(metric="json_valid", over=0.9, severity="invariant"),),
        abort_when={"worse_on": ["json_valid"], "against": "log"},
    )
    assert decide(simple(marks(50, 100), marks(50, 100)), chosen).decision == "abort"


def test_a_figure_without_pairs_is_compared_by_both_intervals():
    mine, theirs = subject("adapter", {"json_valid": [1]}), subject("base", {"json_valid": [1]})
    mine = mine.model_copy(
        update={"metrics": {**mine.metrics, "latency_seconds": number("latency_seconds", 3, 2, 4, n=8)}}
    )
    near = theirs.model_copy(
        update={"metrics": {**theirs.metrics, "latency_seconds": number("latency_seconds", 5, 3.5, 6, n=8)}}
    )
    far = theirs.model_copy(
        update={"metrics": {**theirs.metrics, "latency_seconds": number("latency_seconds", 9, 8, 10, n=8)}}
    )
    chosen = GateSettings(rules=(GateRule(metric="json_valid", over=0.0),), win="latency_seconds")
    assert decide(report(mine, near), chosen).rules[-1].outcome == "unknown"
    assert decide(report(mine, far), chosen).rules[-1].outcome == "pass"
