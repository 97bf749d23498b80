"""The order of rows: every row in every epoch, by weights and stages, crossed with others for a judge."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.train.objectives.epochs import (
    choose_rows,
    choose_training_rows,
    count_visits,
    learning_rate,
    plan_batches,
    plan_steps,
)
from graftwork.train.objectives.preference import JudgedOrder
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.settings import TrainSettings

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60).map(tuple)
WEIGHTS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]), st.floats(0, 4))
WEIGHTED = st.lists(st.tuples(st.integers(1, 500), WEIGHTS), min_size=1, max_size=40)
STAGED = st.lists(st.tuples(st.integers(1, 500), st.none() | st.integers(0, 5)), min_size=1, max_size=60)


def make_row(number, *, length=20, weight=1.0, stage=None):
    return Row(
        id=str(number),
        origin=Origin(file="log.jsonl", line=number + 1),
        messages=(Message(role="user", content="x"),),
        reply="y",
        tokens=(5,) * length,
        trained_from=length - 2,
        weight=weight,
        stage=stage,
    )


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), epochs=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_row_stands_once_in_every_epoch(lengths, batch_size, epochs, seed):
    batches = plan_batches(lengths, batch_size=batch_size, epochs=epochs, seed=seed)
    steps = -(-len(lengths) // batch_size)
    assert len(batches) == steps * epochs
    for epoch in range(epochs):
        rows = [row for batch in batches[epoch * steps : (epoch + 1) * steps] for row in batch]
        assert sorted(rows) == list(range(len(lengths)))
    assert batches == plan_batches(lengths, batch_size=batch_size, epochs=epochs, seed=seed)


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_batches_of_an_epoch_differ_by_at_most_one_row(lengths, batch_size, epochs, seed):
    sizes = [len(batch) for batch in plan_batches(lengths, batch_size=batch_size, epochs=epochs, seed=seed)]
    assert max(sizes) - min(sizes) <= 1


@given(lengths=LENGTHS, batch_size=st.integers(2, 9), kind=st.integers(1, 500), seed=st.integers(0, 99))
def test_rows_of_one_kind_are_spread_over_all_batches(lengths, batch_size, kind, seed):
    """A kind are the shortest rows: each batch has its share of them, rounded."""
    batches = plan_batches(lengths, batch_size=batch_size, epochs=1, seed=seed)
    counts = [sum(lengths[row] < kind for row in batch) for batch in batches]
    assert max(counts) - min(counts) <= 1


@given(lengths=LENGTHS, batch_size=st.integers(1, 9))
def test_rows_of_a_batch_are_sorted_by_length_for_micro_batches(lengths, batch_size):
    for batch in plan_batches(lengths, batch_size=batch_size, epochs=1, seed=0):
        assert [lengths[row] for row in batch] == sorted(lengths[row] for row in batch)


def test_another_seed_is_another_order():
    lengths = tuple(range(1, 41))
    orders = {plan_batches(lengths, batch_size=4, epochs=1, seed=seed) for seed in range(5)}
    assert len(orders) == 5


@given(rows=WEIGHTED, batch_size=st.integers(1, 9), epochs=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_row_stands_as_often_as_its_weight_says(rows, batch_size, epochs, seed):
    lengths, weights = zip(*rows, strict=True)

    def plan(epochs):
        return plan_batches(lengths, batch_size=batch_size, epochs=epochs, seed=seed, weights=weights)

    before: Counter[int] = Counter()
    for epoch in range(1, epochs + 1):
        steps = plan(epoch)
        assert all(1 <= len(step) <= batch_size for step in steps)
        visits = Counter(row for step in steps for row in step)
        for row, weight in enumerate(weights):
            # Over all epochs so far within one of the exact figure, and in this epoch too.
            assert abs(visits[row] - epoch * weight) < 1 + 1e-9
            assert visits[row] - before[row] in (math.floor(weight), math.floor(weight) + 1)
            if weight.is_integer():
                assert visits[row] - before[row] == weight
        before = visits
    assert plan(epochs) == steps
    # An epoch more changes nothing of those before.
    assert plan(epochs + 1)[: len(steps)] == steps


def test_half_a_weight_is_every_second_epoch_and_in_each_epoch_half_of_the_rows():
    count = 2000
    steps = [
        Counter(
            row
            for step in plan_batches(
                (9,) * count, batch_size=1, epochs=epochs, seed=3, weights=(0.5,) * count
            )
            for row in step
        )
        for epochs in range(1, 5)
    ]
    assert abs(len(steps[0]) / count - 0.5) < 0.04
    assert [set(visits.values()) for visits in steps[1::2]] == [{1}, {2}]
    assert len(steps[1]) == count


@given(weight=st.floats(0, 5), epoch=st.integers(0, 50))
def test_visits_are_exact_in_expectation_in_every_epoch(weight, epoch):
    phases = [(place + 0.5) / 4096 for place in range(4096)]
    mean = sum(count_visits(weight, epoch=epoch, phase=phase) for phase in phases) / 4096
    assert abs(mean - weight) <= 2 / 4096


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_visits_is_refused(weight):
    with pytest.raises(ValueError, match="at least 0"):
        plan_batches((9, 9), batch_size=1, epochs=1, seed=0, weights=(1.0, weight))


@given(rows=STAGED, batch_size=st.integers(1, 9), epochs=st.integers(1, 3), seed=st.integers(0, 99))
def test_lower_stages_come_first_in_every_epoch_and_no_batch_spans_two(rows, batch_size, epochs, seed):
    lengths, stages = zip(*rows, strict=True)
    steps = plan_batches(lengths, batch_size=batch_size, epochs=epochs, seed=seed, stages=stages)
    last = max((stage for stage in stages if stage is not None), default=0)
    ranks = [last if stage is None else stage for stage in stages]
    in_an_epoch = sum(-(-count // batch_size) for count in Counter(ranks).values())
    assert len(steps) == in_an_epoch * epochs
    for epoch in range(epochs):
        batches = steps[epoch * in_an_epoch : (epoch + 1) * in_an_epoch]
        assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
        spans = [{ranks[row] for row in batch} for batch in batches]
        assert all(len(span) == 1 for span in spans)
        order = [span.pop() for span in spans]
        assert order == sorted(order)


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), seed=st.integers(0, 9))
def test_no_stages_and_weights_of_one_change_nothing(lengths, batch_size, seed):
    plain = plan_batches(lengths, batch_size=batch_size, epochs=2, seed=seed)
    ones, none = (1.0,) * len(lengths), (None,) * len(lengths)
    assert plain == plan_batches(
        lengths, batch_size=batch_size, epochs=2, seed=seed, weights=ones, stages=none
    )


def test_batches_of_a_stage_are_shuffled():
    lengths, stages = tuple(range(1, 81)), (1,) * 40 + (2,) * 40
    plans = {plan_batches(lengths, batch_size=4, epochs=1, seed=seed, stages=stages) for seed in range(5)}
    assert len({plan[:10] for plan in plans}) == len({plan[10:] for plan in plans}) == 5


def test_a_run_goes_by_the_stages_and_weights_of_its_rows():
    rows = [make_row(0, stage=2), make_row(1, stage=1, weight=2.0), make_row(2)]
    steps = plan_steps(rows, settings=TrainSettings(batch_size=2, epochs=2))
    assert [tuple(sorted(step)) for step in steps] == [(1, 1), (0, 2)] * 2


def test_rows_that_weigh_nothing_take_no_place_of_the_budget():
    rows = [make_row(number, weight=float(number % 2)) for number in range(20)]
    chosen = choose_training_rows(rows, settings=TrainSettings(max_rows=8))
    assert len(chosen) == 8
    assert all(row.weight == 1 for row in chosen)


def test_weights_that_leave_nothing_are_a_mistake_with_its_key():
    with pytest.raises(UserError) as caught:
        plan_steps([make_row(0, weight=1e-9)], settings=TrainSettings(epochs=1))
    assert "`weights`" in caught.value.fix


@given(count=st.integers(1, 200), most=st.integers(1, 200), seed=st.integers(0, 9))
def test_a_budget_of_rows_is_kept_and_stable(count, most, seed):
    chosen = choose_rows(count, most=most, seed=seed)
    assert len(chosen) == min(count, most) == len(set(chosen))
    assert list(chosen) == sorted(chosen)
    assert chosen == choose_rows(count, most=most, seed=seed)
    assert choose_rows(count, most=None, seed=seed) == tuple(range(count))


@given(steps=st.integers(1, 300), warmup=st.floats(0, 0.9))
def test_the_rate_rises_then_falls_and_no_step_is_wasted(steps, warmup):
    rates = [learning_rate(s, steps=steps, highest=1e-3, warmup_ratio=warmup) for s in range(1, steps + 1)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def make_reply(number, weight=1.0):
    return TrainingSample(
        id=f"row{number}",
        origin=Origin(file="f", line=number + 1),
        messages=(Message(role="user", content="q"),),
        reply="a",
        tokens=(100 + number, 200 + number),
        trained_from=1,
        weight=weight,
        unit=f"row{number}",
        part="chosen" if number % 2 else "rejected",
    )


def make_order(samples, **settings):
    return JudgedOrder(
        samples,
        settings=TrainSettings(objective="kto", epochs=1, **settings),
        now=lambda rows: [0.0] * len(rows),
        start=lambda rows: [0.0] * len(rows),
    )


@pytest.mark.parametrize("weights", [[1.0] * 5, [2.0, 1.0, 1.0], [4.0, 1.0]])
def test_no_prompt_is_crossed_with_its_own_reply(weights):
    order = make_order([make_reply(at, weight) for at, weight in enumerate(weights)], batch_size=2)
    crossed = [row.tokens for step in range(1, order.steps + 1) for row in order.mismatched(step)]
    assert len(crossed) == sum(weights)
    assert all(reply - prompt != 100 for prompt, reply in crossed)


def test_a_crossed_row_is_no_longer_than_any_row():
    """Memory is planned for the longest row, and positions may end there."""
    prompts, replies = (6, 1, 4), (1, 7, 2)
    samples = [
        make_reply(at).model_copy(
            update={"tokens": (at,) * prompt + (50 + at,) * reply, "trained_from": prompt}
        )
        for at, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    order = make_order(samples, batch_size=3)
    crossed = order.mismatched(1)
    assert max(len(row.tokens) for row in crossed) == 8
    assert all(len(row.tokens) > row.trained_from for row in crossed)


def test_rows_of_a_step_are_crossed_with_the_row_before():
    order = make_order([make_reply(at) for at in range(4)], batch_size=4)
    order._steps = ((0, 1, 2, 3),)
    assert [row.tokens for row in order.mismatched(1)] == [(100, 203), (101, 200), (102, 201), (103, 202)]
