"""The order of judged replies: the baseline of a step comes from prompts with the replies of other rows."""

import pytest

from graftwork.records.interaction import Message, Origin
from graftwork.train.objectives.preference import JudgedOrder
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.settings import TrainSettings


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
