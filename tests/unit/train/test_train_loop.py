"""The loop learns, resumes to the same bytes, and stops at the first sign of nonsense."""

import random

import pytest
import torch

from graftwork.model.adapter import AdapterShape, attach
from graftwork.model.load import base_digest, load_base
from graftwork.records.dataset import Row
from graftwork.records.errors import StoppedInOrder
from graftwork.records.interaction import Message, Origin
from graftwork.train.attend.attendant import Attendant
from graftwork.train.engine import Engine
from graftwork.train.log import read_journal, read_steps
from graftwork.train.loop import Diverged, Loop
from graftwork.train.loss import Batch, summed_loss
from graftwork.train.order import shared_tokens
from graftwork.train.settings import TrainSettings

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
SETTINGS = TrainSettings(
    rank=4, alpha=8, epochs=2, batch_rows=4, learning_rate=5e-2, checkpoint_every=3, threads=1
)


class Killed(BaseException):
    """Stands in for kill -9: nothing in the program catches it."""


def make_rows(count=16):
    chance = random.Random(1)
    rows = []
    for number in range(count):
        prompt = [chance.randrange(100, 400) for _ in range(chance.randrange(5, 12))]
        reply = [7, 8, 9, 10 + number % 3, 2]
        rows.append(
            Row(
                id=str(number),
                origin=Origin(file="log.jsonl", line=number + 1),
                messages=(Message(role="user", content="x"),),
                reply="y",
                tokens=(*prompt, *reply),
                trained_from=len(prompt),
            )
        )
    return rows


class Before(Attendant):
    """Calls back before each step."""

    def __init__(self, call):
        self._call = call

    def before_step(self, number, steps):
        self._call(number, steps)


def make_loop(tiny_base, folder, *, rows=None, before=None, words=None, **more):
    torch.set_num_threads(1)
    model = load_base(tiny_base)
    engine = Engine(model, attach(model, SHAPE, seed=SETTINGS.seed), settings=SETTINGS)
    attendants = [Before(before)] if before else []
    on_word = words.append if words is not None else lambda word: None
    return Loop(
        engine,
        rows or make_rows(),
        settings=SETTINGS,
        folder=folder,
        attendants=attendants,
        on_word=on_word,
        **more,
    )


def final(loop):
    return loop._engine.digest()


def test_the_loss_falls_and_the_base_stays(tiny_base, tmp_path):
    loop = make_loop(tiny_base, tmp_path)
    before = base_digest(loop._engine.model)
    loop.run()
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == list(range(1, 9))
    assert steps[-1].loss < steps[0].loss - 0.5
    assert base_digest(loop._engine.model) == before


def test_the_same_run_gives_the_same_bytes(tiny_base, tmp_path):
    first, second = make_loop(tiny_base, tmp_path / "a"), make_loop(tiny_base, tmp_path / "b")
    first.run()
    second.run()
    assert final(first) == final(second)
    assert [s.loss for s in read_steps(tmp_path / "a")] == [s.loss for s in read_steps(tmp_path / "b")]


@pytest.mark.parametrize("killed_before", range(1, 9))
def test_killed_before_any_step_it_resumes_to_the_same_bytes(tiny_base, tmp_path, killed_before):
    whole = make_loop(tiny_base, tmp_path / "whole")
    whole.run()

    def die(step, _steps):
        if step == killed_before:
            raise Killed

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=die).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    replay = resumed.run()
    assert final(resumed) == final(whole)
    done_twice = (killed_before - 1) % SETTINGS.checkpoint_every
    assert (replay.steps if replay else 0) == done_twice
    assert replay is None or replay.identical
    assert len(read_journal(tmp_path / "cut")) == whole.steps + done_twice
    assert [s.loss for s in read_steps(tmp_path / "cut")] == [s.loss for s in read_steps(tmp_path / "whole")]


def test_a_damaged_checkpoint_costs_time_and_not_the_result(tiny_base, tmp_path):
    whole = make_loop(tiny_base, tmp_path / "whole")
    whole.run()

    def die(step, _steps):
        if step == 8:
            raise Killed

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=die).run()
    newest = tmp_path / "cut" / "checkpoints" / "step-000006" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    words: list[str] = []
    resumed = make_loop(tiny_base, tmp_path / "cut", words=words)
    resumed.run()
    assert final(resumed) == final(whole)
    assert any("step-000006 is passed over" in word for word in words)


def test_asked_to_stop_it_saves_and_goes_on_later(tiny_base, tmp_path):
    whole = make_loop(tiny_base, tmp_path / "whole")
    whole.run()
    asked: list[int] = []

    def stop():
        asked.append(1)
        return len(asked) == 6

    with pytest.raises(StoppedInOrder, match="after step 5 of 8"):
        make_loop(tiny_base, tmp_path / "cut", stop_asked=stop).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    assert resumed.run() is None
    assert final(resumed) == final(whole)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_rows(tiny_base, tmp_path):
    loop = make_loop(tiny_base, tmp_path)
    with torch.no_grad():
        loop._engine.parameters[0].fill_(float("nan"))
    with pytest.raises(Diverged) as caught:
        loop.run()
    assert "log.jsonl:" in caught.value.where
    assert "learning_rate" in caught.value.fix


def test_the_loss_is_that_of_transformers_on_the_reply_alone(tiny_base):
    model = load_base(tiny_base)
    rows = make_rows(5)
    batch = Batch(rows, device="cpu")
    with torch.inference_mode():
        ours = float(summed_loss(model, batch))
        theirs = 0.0
        for row in rows:
            labels = [-100] * row.trained_from + list(row.tokens[row.trained_from :])
            loss = model(torch.tensor([row.tokens]), labels=torch.tensor([labels])).loss
            theirs += float(loss) * (len(row.tokens) - row.trained_from)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert batch.trained == 25


def test_a_shared_beginning_is_read_once_and_the_gradient_stays(tiny_base):
    plain = make_rows(6)
    beginning = tuple(range(200, 230))
    rows = [
        row.model_copy(
            update={"tokens": (*beginning, *row.tokens), "trained_from": row.trained_from + len(beginning)}
        )
        for row in plain
    ]
    assert shared_tokens(rows) >= len(beginning)
    assert shared_tokens(plain) == 0
    assert shared_tokens(rows[:1]) == 0

    def gradients(batches):
        model = load_base(tiny_base)
        parameters = attach(model, SHAPE, seed=3)
        with torch.no_grad():
            for parameter in parameters[1::2]:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        loss = sum(summed_loss(model, batch) for batch in batches)
        loss.backward()
        return float(loss.detach()), [parameter.grad for parameter in parameters]

    together = gradients([Batch(rows, device="cpu")])
    alone = gradients([Batch([row], device="cpu") for row in rows])
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    for ours, theirs in zip(together[1], alone[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)
