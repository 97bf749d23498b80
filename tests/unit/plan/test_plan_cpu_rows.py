"""What a plan of a real dataset knows of the processor's step comes from the rows themselves."""

from types import SimpleNamespace

import pytest

from graftwork.costmodel.cpu_step import TrunkTokens
from graftwork.pipeline.steps import plan as step
from graftwork.plan.catalog.models import find_model
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.train.settings import TrainSettings

SHAPE = find_model("smollm2-135m").shape
SHARED, REPLY = 10, 3


def row(number: int, length: int, *, same_as: int | None = None) -> Row:
    own = number if same_as is None else same_as
    tokens = (*range(SHARED), 100 + own, *range(200, 200 + length - SHARED - 1))
    return Row(
        id=str(number),
        origin=Origin(file="log.jsonl", line=number + 1),
        messages=(Message(role="user", content="x"),),
        reply="y",
        tokens=tokens,
        trained_from=length - REPLY,
    )


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch):
    rows = [row(0, 30), row(1, 40), row(2, 50), row(3, 50, same_as=2)]
    monkeypatch.setattr(step, "read_rows", lambda *_: rows)
    monkeypatch.setattr(step, "iterate_rows", lambda *_: iter(()))
    settings = TrainSettings(batch_size=2, epochs=3, max_rows=None)
    work = SimpleNamespace(settings=SimpleNamespace(train=settings))
    return step.measure_work(work, SimpleNamespace(folder="x"), SHAPE)  # type: ignore[arg-type]


def test_a_row_that_occurs_twice_is_read_once(ahead):
    once = (30 + 40 + 50) - 3 * (SHARED + 1)
    visits = 3 * ((30 + 40 + 50 + 50) - 4 * (SHARED + 1))
    assert ahead.trunk == TrunkTokens(once, visits)


def test_the_batch_with_most_replies_is_known(ahead):
    assert ahead.load.most_replies == 2 * REPLY
    assert ahead.load.shared_tokens == SHARED
    assert ahead.load.cpu_step is None


def test_pairs_are_planned_with_the_tokens_of_both_replies():
    rows = [row(0, 30), row(1, 40), row(2, 50)]
    rejected = [some.model_copy(update={"rejected": f"no {some.id}"}) for some in rows[:2]]

    def render(some, _reply):
        return (*some.tokens[: some.trained_from], 7), some.trained_from

    planned = step.rows_of_pairs([*rejected, rows[2]], render)
    assert [len(some.tokens) for some in planned] == [29, 29, 39, 39]
    assert len({some.tokens for some in planned}) == 4
    assert all(len(some.tokens) > some.trained_from for some in planned)
