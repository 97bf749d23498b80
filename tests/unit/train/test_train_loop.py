"""The loop learns, resumes to the same bytes, and stops at the first sign of nonsense."""

import errno
import json
import math
import random
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from train_samples import SETTINGS, SHAPE, make_engine, make_rows

from graftwork.files.disk import Journal
from graftwork.model.adapters.peft import attach
from graftwork.model.load import base_digest, load_base
from graftwork.records.errors import EnvironmentFailure, GracefulStop
from graftwork.records.run import TrainStep
from graftwork.train import checkpoints as checkpoint_tensors
from graftwork.train.callbacks import (
    Diverged,
    DivergenceCallback,
    EarlyStop,
    HeartbeatCallback,
    TrainingCallback,
)
from graftwork.train.checkpoints import CheckpointMismatch, CheckpointStore, latest_good
from graftwork.train.loop import RunContext, StepInterrupted, TrainingLoop
from graftwork.train.loss import TokenBatch, summed_loss
from graftwork.train.objectives.epochs import EpochOrder, shared_tokens
from graftwork.train.run_folder import StepLog, read_journal, read_steps
from graftwork.train.settings import EvalSettings
from graftwork.train.worker import stoppable_progress


class Killed(BaseException):
    """Stands in for kill -9: nothing in the program catches it."""


class Before(TrainingCallback):
    """Calls back before each step."""

    def __init__(self, call):
        self._call = call

    def on_step_begin(self, number, steps):
        self._call(number, steps)


def make_loop(
    tiny_base, folder, *, rows=None, before=None, words=None, callbacks=(), settings=SETTINGS, **more
):
    progress = more.pop("progress", lambda *_: None)
    context = {key: more.pop(key) for key in ("stop_requested", "identity", "versions") if key in more}
    engine = make_engine(tiny_base, settings, progress=progress)
    report = words.append if words is not None else lambda word: None
    return TrainingLoop(
        engine,
        EpochOrder(rows or make_rows(), settings=settings),
        RunContext(settings, folder, report=report, **context),
        callbacks=[*callbacks, *([Before(before)] if before else [])],
        **more,
    )


def final(loop):
    return loop._engine.digest()


@pytest.fixture(scope="module")
def whole(tiny_base, tmp_path_factory):
    """A run of `SETTINGS` that nothing interrupts."""
    folder = tmp_path_factory.mktemp("loop") / "whole"
    loop, digests = make_loop(tiny_base, folder), {}
    loop._digest_is_cheap = True
    loop._callbacks = [After(lambda step: digests.update({step.step: loop._engine.digest()}))]
    loop.run()
    return SimpleNamespace(folder=folder, steps=loop.steps, digest=final(loop), digests=digests)


class After(TrainingCallback):
    def __init__(self, call):
        self._call = call

    def on_step_end(self, step, steps):
        self._call(step)


def dies_at(number):
    def die(step, _steps):
        if step == number:
            raise Killed

    return die


def test_the_loss_falls_and_the_base_stays(tiny_base, tmp_path):
    loop = make_loop(tiny_base, tmp_path, settings=SETTINGS.model_copy(update={"epochs": 4}))
    before = base_digest(loop._engine.model)
    untrained = loop._engine.loss(make_rows())
    loop.run()
    assert [step.step for step in read_steps(tmp_path)] == list(range(1, 17))
    assert loop._engine.loss(make_rows()) < untrained - 0.5
    assert base_digest(loop._engine.model) == before


def test_the_same_run_gives_the_same_bytes(tiny_base, tmp_path, whole):
    again = make_loop(tiny_base, tmp_path)
    again.run()
    assert final(again) == whole.digest
    assert [step.loss for step in read_steps(tmp_path)] == [step.loss for step in read_steps(whole.folder)]


EACH_STEP = [
    number if number in (1, 3, 4, 8) else pytest.param(number, marks=pytest.mark.slow)
    for number in range(1, 9)
]
"""Before the first checkpoint, before one, after one, and before the last step, in the quick tests."""


@pytest.mark.parametrize("killed_before", EACH_STEP)
def test_killed_before_any_step_it_resumes_to_the_same_bytes(tiny_base, tmp_path, whole, killed_before):

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=dies_at(killed_before)).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    replay = resumed.run()
    assert final(resumed) == whole.digest
    done_twice = (killed_before - 1) % SETTINGS.checkpoint_every
    assert (replay[0] if replay else 0) == done_twice
    assert replay is None or replay[1]
    assert len(read_journal(tmp_path / "cut")) == whole.steps + done_twice
    assert [s.loss for s in read_steps(tmp_path / "cut")] == [s.loss for s in read_steps(whole.folder)]


def test_a_damaged_checkpoint_costs_time_and_not_the_result(tiny_base, tmp_path, whole):

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=dies_at(8)).run()
    newest = tmp_path / "cut" / "checkpoints" / "step-000006" / "tensors.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    words: list[str] = []
    resumed = make_loop(tiny_base, tmp_path / "cut", words=words)
    resumed.run()
    assert final(resumed) == whole.digest
    assert any("step-000006 is skipped" in word for word in words)


def test_asked_to_stop_it_saves_and_goes_on_later(tiny_base, tmp_path, whole):
    asked: list[int] = []

    def stop():
        asked.append(1)
        return len(asked) == 6

    with pytest.raises(GracefulStop, match="after step 5 of 8"):
        make_loop(tiny_base, tmp_path / "cut", stop_requested=stop).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    assert resumed.run() is None
    assert final(resumed) == whole.digest


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_rows(tiny_base, tmp_path):
    loop = make_loop(tiny_base, tmp_path, callbacks=[DivergenceCallback(SETTINGS.watch)])
    with torch.no_grad():
        loop._engine.parameters[0].fill_(float("nan"))
    with pytest.raises(Diverged) as caught:
        loop.run()
    assert "log.jsonl:" in caught.value.where
    assert "learning_rate" in caught.value.fix


def record_learned(loop):
    """The rows of each gradient that was applied, as training goes on."""
    engine, learned, current = loop._engine, [], []
    backward, apply = engine.backward, engine.apply

    def watched_backward(rows):
        current[:] = rows
        return backward(rows)

    def watched_apply(rate):
        learned.append([row.id for row in current])
        apply(rate)

    engine.backward, engine.apply = watched_backward, watched_apply
    return learned


def refusing_log(seed, *, count=100, share=0.06):
    """Long rows with one and the same easy reply, and short refusals that each have their own."""
    chance, (row,) = random.Random(seed), make_rows(1)
    rows = []
    for number in range(count):
        refuses = number < round(share * count)
        prompt = [chance.randrange(100, 400) for _ in range(4 if refuses else chance.randrange(12, 16))]
        reply = [chance.randrange(400, 500) for _ in range(3)] if refuses else [7] * 9
        fields = {"tokens": (*prompt, *reply), "trained_from": len(prompt)}
        rows.append(row.model_copy(update={"id": f"{'no' if refuses else 'yes'}/{number}", **fields}))
    return rows


@torch.no_grad()
def make_sure_of_itself(loop):
    """As a trained model is: easy rows get a loss near zero, refusals one of ten and more."""
    loop._engine.model.get_output_embeddings().weight.mul_(20)


SEEDS = [(1, 8, 100), (1, 1, 60), *(pytest.param(seed, 8, 100, marks=pytest.mark.slow) for seed in (2, 3))]


@pytest.mark.parametrize(("seed", "batch_size", "count"), SEEDS)
def test_every_refusal_in_a_log_of_easy_rows_is_learned_from_in_every_epoch(
    tiny_base, tmp_path, seed, batch_size, count
):
    settings = SETTINGS.model_copy(
        update={"seed": seed, "batch_size": batch_size, "epochs": 3, "learning_rate": 3e-2}
    )
    rows, words = refusing_log(seed, count=count), []
    guard = DivergenceCallback(
        settings.watch, peek=EpochOrder(rows, settings=settings).peek, report=words.append
    )
    loop = make_loop(tiny_base, tmp_path, rows=rows, settings=settings, callbacks=[guard])
    make_sure_of_itself(loop)
    learned = record_learned(loop)
    loop.run()
    assert min(step.loss for step in read_steps(tmp_path)) < 0.1
    epoch = len(learned) // 3
    for number in range(3):
        visits = [row for batch in learned[number * epoch : (number + 1) * epoch] for row in batch]
        assert sorted(visits) == sorted(row.id for row in rows)
    assert not words


def test_batches_of_the_easy_rows_have_no_batch_of_refusals_alone():
    rows = refusing_log(1)
    order = EpochOrder(rows, settings=SETTINGS)
    for step in range(1, order.steps + 1):
        assert sum(row.id.startswith("no") for row in order.batch(step)) <= 1


class OneBadGradient:
    """Makes the first gradient of one batch no number, in this process and in a resumed one."""

    def __init__(self, loop, step, *, times=1):
        self._backward, self._rows = loop._engine.backward, loop._source.batch(step)
        self._times = times
        loop._engine.backward = self

    def __call__(self, rows):
        measured = self._backward(rows)
        if [row.id for row in rows] == [row.id for row in self._rows] and self._times:
            self._times -= 1
            return replace(measured, loss=math.nan)
        return measured


def test_a_skipped_batch_is_trained_on_after_the_next_good_step(tiny_base, tmp_path):
    words = []
    loop = make_loop(tiny_base, tmp_path, words=words, callbacks=[DivergenceCallback(SETTINGS.watch)])
    OneBadGradient(loop, 3)
    learned = record_learned(loop)
    loop.run()
    source = loop._source
    names = [[row.id for row in source.batch(step)] for step in range(1, 9)]
    assert learned == [*names[:2], names[3], names[2], *names[4:]]
    steps = read_steps(tmp_path)
    assert [step.step for step in steps if step.skipped] == [3]
    assert [step.repeated for step in steps if step.repeated] == [(3,)]
    assert not words


def test_a_batch_that_fails_again_is_left_out_with_a_message(tiny_base, tmp_path):
    words = []
    loop = make_loop(tiny_base, tmp_path, words=words, callbacks=[DivergenceCallback(SETTINGS.watch)])
    OneBadGradient(loop, 3, times=2)
    learned = record_learned(loop)
    loop.run()
    assert len(learned) == loop.steps - 1
    assert words == ["the rows of step 3 failed again and are left out of this epoch"]
    assert not any(step.repeated for step in read_steps(tmp_path))


@pytest.mark.parametrize("killed_before", [4, 5])
def test_a_skipped_batch_survives_a_resume_to_the_same_bytes(tiny_base, tmp_path, killed_before):
    def make(folder, **more):
        loop = make_loop(tiny_base, folder, callbacks=[DivergenceCallback(SETTINGS.watch)], **more)
        OneBadGradient(loop, 3)
        return loop

    whole = make(tmp_path / "whole")
    whole.run()
    with pytest.raises(Killed):
        make(tmp_path / "cut", before=dies_at(killed_before)).run()
    # The checkpoint of step 3 was saved while its rows waited.
    resumed = make_loop(tiny_base, tmp_path / "cut", callbacks=[DivergenceCallback(SETTINGS.watch)])
    resumed.run()
    assert final(resumed) == final(whole)


def test_a_stop_request_during_the_repetition_resumes_to_the_same_bytes(tiny_base, tmp_path):
    whole = make_loop(tiny_base, tmp_path / "whole", callbacks=[DivergenceCallback(SETTINGS.watch)])
    OneBadGradient(whole, 3)
    whole.run()
    cut = make_loop(
        tiny_base,
        tmp_path / "cut",
        callbacks=[DivergenceCallback(SETTINGS.watch)],
        stop_requested=lambda: len(passes) == 5,
    )
    OneBadGradient(cut, 3)
    passes, backward = [], cut._engine.backward

    def interrupted(rows):
        passes.append(rows)
        # Steps 1 to 4, then the rows of step 3 again.
        if len(passes) == 5:
            raise StepInterrupted
        return backward(rows)

    cut._engine.backward = interrupted
    with pytest.raises(GracefulStop, match="after step 4 of 8"):
        cut.run()
    resumed = make_loop(tiny_base, tmp_path / "cut", callbacks=[DivergenceCallback(SETTINGS.watch)])
    resumed.run()
    assert final(resumed) == final(whole)


def test_a_model_that_got_worse_everywhere_stops_the_run(tiny_base, tmp_path):
    settings = SETTINGS.model_copy(update={"batch_size": 8, "epochs": 3, "learning_rate": 3e-2})
    rows = refusing_log(1)
    guard = DivergenceCallback(settings.watch, peek=EpochOrder(rows, settings=settings).peek)

    def damage(number, _steps):
        if number == 34:
            with torch.no_grad():
                for parameter in loop._engine.parameters:
                    parameter.normal_(std=3.0)

    loop = make_loop(tiny_base, tmp_path, rows=rows, settings=settings, before=damage, callbacks=[guard])
    make_sure_of_itself(loop)
    with pytest.raises(Diverged, match=r"step 35: the loss jumped to .*, and the rows of step .* rose to"):
        loop.run()


def test_the_loss_is_that_of_transformers_on_the_reply_alone(tiny_base):
    model = load_base(tiny_base)
    rows = make_rows(5)
    batch = TokenBatch(rows, device="cpu")
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

    together = gradients([TokenBatch(rows, device="cpu")])
    alone = gradients([TokenBatch([row], device="cpu") for row in rows])
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    for ours, theirs in zip(together[1], alone[1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


class Looks(TrainingCallback):
    """Looks at some steps, and sees what it was asked to."""

    name = "looks"

    def __init__(self, scores, *, finish_at=None):
        self._scores, self._finish_at = scores, finish_at
        self._score = None

    def on_step_end(self, step, steps):
        self._score = self._scores.get(step.step)
        if step.step == self._finish_at:
            raise EarlyStop("no better any more")

    def score(self):
        return self._score


def weights_after(folder):
    return {step.step: step.weights for step in read_steps(folder)}


@pytest.mark.parametrize("best", [1, 4, 6, 8])
def test_the_adapter_is_that_of_the_best_evaluation(tiny_base, tmp_path, whole, best):
    words: list[str] = []
    scores = {1: 0.8, 4: 0.7, 6: 0.7, 8: 0.75} | {best: 0.5}
    loop = make_loop(tiny_base, tmp_path / "best", callbacks=[Looks(scores)], words=words)
    loop.run()
    assert final(loop) == whole.digests[best]
    assert loop.kept_step == (None if best == 8 else best)
    assert any(f"from step {best}" in word for word in words) == (best != 8)


def test_without_keep_best_the_last_step_stays(tiny_base, tmp_path, whole):
    settings = SETTINGS.model_copy(update={"eval": EvalSettings(keep_best=False)})
    loop = make_loop(tiny_base, tmp_path / "best", callbacks=[Looks({2: 0.1})], settings=settings)
    loop.run()
    assert final(loop) == whole.digest


@pytest.mark.parametrize("killed_before", [5, 8])
def test_the_best_evaluation_survives_a_kill(tiny_base, tmp_path, killed_before):
    scores = {2: 0.9, 4: 0.1, 6: 0.5}
    whole = make_loop(tiny_base, tmp_path / "whole", callbacks=[Looks(scores)])
    whole.run()

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=dies_at(killed_before), callbacks=[Looks(scores)]).run()
    resumed = make_loop(tiny_base, tmp_path / "cut", callbacks=[Looks(scores)])
    resumed.run()
    assert final(resumed) == final(whole)
    assert resumed.kept_step == 4


def test_a_run_that_finished_early_is_finished_after_a_kill_too(tiny_base, tmp_path):
    first = make_loop(tiny_base, tmp_path, callbacks=[Looks({2: 0.1}, finish_at=5)])
    first.run()
    again = make_loop(tiny_base, tmp_path)
    again.run()
    assert [step.step for step in read_steps(tmp_path)] == [1, 2, 3, 4, 5]
    assert again.finished == first.finished == "no better any more"
    assert final(again) == final(first)


@pytest.mark.parametrize(
    ("change", "output"),
    [
        (
            {"settings": SETTINGS.model_copy(update={"learning_rate": 1e-3})},
            "settings.learning_rate was 0.05",
        ),
        ({"rows": make_rows(20)}, "steps was 8 and is 10"),
        ({"rows": list(reversed(make_rows()))}, "order was"),
        ({"identity": {"dataset": "other"}}, "dataset was one and is other"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tiny_base, tmp_path, change, output):
    stop = iter([False] * 4 + [True])
    identity = {"identity": {"dataset": "one"}}
    with pytest.raises(GracefulStop):
        make_loop(tiny_base, tmp_path, stop_requested=lambda: next(stop), **identity).run()
    with pytest.raises(CheckpointMismatch) as caught:
        make_loop(tiny_base, tmp_path, **(identity | change)).run()
    assert output in caught.value.why
    assert "the checkpoint of step 4" in caught.value.what


def test_how_a_run_is_kept_may_change(tiny_base, tmp_path, whole):
    stop = iter([False] * 4 + [True])
    with pytest.raises(GracefulStop):
        make_loop(tiny_base, tmp_path, stop_requested=lambda: next(stop)).run()
    run = SETTINGS.run.model_copy(update={"max_restarts": 9})
    kept = {"run": run, "checkpoint_every": 2, "keep_checkpoints": 5}
    loop = make_loop(tiny_base, tmp_path, settings=SETTINGS.model_copy(update=kept))
    loop.run()
    assert final(loop) == whole.digest


def test_other_versions_are_a_warning(tiny_base, tmp_path):
    stop = iter([False] * 4 + [True])
    with pytest.raises(GracefulStop):
        make_loop(tiny_base, tmp_path, stop_requested=lambda: next(stop), versions={"torch": "2.11"}).run()
    words: list[str] = []
    make_loop(tiny_base, tmp_path, versions={"torch": "2.13"}, words=words).run()
    assert any("made with torch 2.11" in word for word in words)


@pytest.mark.parametrize("part", [1, 4])
def test_asked_to_stop_inside_a_step_it_gives_the_step_up_and_nothing_has_changed(
    tiny_base, tmp_path, whole, part
):
    beats: list[str] = []
    torch.set_rng_state(drawn_by(whole.folder))

    def progress(*doing):
        if len(beats) >= 4 * 4:
            torch.rand(3)  # whatever the step that is given up has drawn by then
        beats.append("")
        if len(beats) == 4 * 4 + part:
            raise StepInterrupted

    with pytest.raises(GracefulStop, match="after step 4 of 8"):
        make_loop(tiny_base, tmp_path / "cut", progress=progress).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    assert resumed.run() is None
    assert final(resumed) == whole.digest
    assert torch.equal(drawn_by(tmp_path / "cut"), drawn_by(whole.folder))


@pytest.mark.parametrize("step", [4, 8])
def test_given_up_anywhere_else_it_is_a_stop_in_order_and_goes_on_to_the_same_bytes(
    tiny_base, tmp_path, whole, step
):
    progress = stoppable_progress(lambda *_: None, lambda: True)

    class Looks(TrainingCallback):
        def on_step_end(self, done, steps):
            if done.step == step:
                progress("forward")

    with pytest.raises(GracefulStop) as caught:
        make_loop(tiny_base, tmp_path / "cut", callbacks=[Looks()]).run()
    assert caught.value.exit_code == 75
    assert "stopped cleanly" in caught.value.what
    assert "same command" in caught.value.fix
    resumed = make_loop(tiny_base, tmp_path / "cut")
    resumed.run()
    assert final(resumed) == whole.digest


class FakeHeart:
    def __init__(self):
        self.doing = ""

    def beat(self, *_figures, **_detail):
        self.doing = ""

    def move(self, doing=""):
        self.doing = doing


class SlowCopy:
    """A mirror that notes what the heart says while the run waits for it."""

    in_use, seconds = frozenset(), 0.0

    def __init__(self, heart):
        self._heart = heart
        self.output = []

    def fetch(self, folder): ...

    def send(self, path, step): ...

    def messages(self):
        return iter(())

    def finish(self, seconds):
        self.output.append(self._heart.doing)


@pytest.mark.parametrize("stopped_before", [None, 4, 6])
def test_while_the_last_checkpoint_is_not_safe_everywhere_the_heart_says_so(
    tiny_base, tmp_path, stopped_before
):
    heart = FakeHeart()
    mirror = SlowCopy(heart)

    def stop(number, _steps):
        if number == stopped_before:
            raise GracefulStop("enough")

    loop = make_loop(
        tiny_base,
        tmp_path,
        before=stop,
        callbacks=[HeartbeatCallback(heart, tmp_path)],
        store=CheckpointStore(tmp_path / "checkpoints", keep=2, mirror=mirror),
    )
    with pytest.raises(GracefulStop) if stopped_before else nullcontext():
        loop.run()
    assert set(mirror.output) == {"checkpoint"}
    assert heart.doing == ""


def drawn_by(folder):
    return latest_good(folder / "checkpoints")[0].tensors["random/torch"]


def fill_the_disk(monkeypatch, *, full):
    """Checkpoints meet a full disk while `full` says so; half of the bytes still fit."""

    def parts(tensors):
        whole = parts_of(tensors)
        yield next(whole)
        if full():
            raise OSError(errno.ENOSPC, "No space left on device")
        yield from whole

    parts_of = checkpoint_tensors._file_parts
    monkeypatch.setattr(checkpoint_tensors, "_file_parts", parts)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tiny_base, tmp_path, whole, monkeypatch):
    writes: list[int] = []
    fill_the_disk(monkeypatch, full=lambda: writes.append(1) or len(writes) == 2)
    words: list[str] = []
    loop = make_loop(tiny_base, tmp_path / "full", words=words)
    loop.run()
    assert final(loop) == whole.digest
    (word,) = words
    assert "the checkpoint of step 6 could not be written: the disk is full" in word
    assert "that of step 3 is still good" in word
    assert sorted(p.name for p in (tmp_path / "full" / "checkpoints").iterdir()) == [
        "step-000003",
        "step-000008",
    ]


def test_asked_to_stop_with_a_full_disk_it_says_where_it_will_go_on(tiny_base, tmp_path, monkeypatch):
    writes: list[int] = []
    fill_the_disk(monkeypatch, full=lambda: writes.append(1) or len(writes) > 1)
    stop = iter([False] * 5 + [True])
    with pytest.raises(GracefulStop, match="after step 5 of 8, but") as caught:
        make_loop(tiny_base, tmp_path, stop_requested=lambda: next(stop)).run()
    assert "step 3" in caught.value.why


def test_lines_that_the_disk_refused_are_written_later(tmp_path, monkeypatch):
    log = StepLog(tmp_path)
    figures = {"loss": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0, "tokens": 1, "trained_tokens": 1}
    steps = [TrainStep(step=number, seconds=1.0, **figures) for number in (1, 2, 3)]
    log.add(steps[0])
    log.flush()
    log.add(steps[1])
    with monkeypatch.context() as full:
        full.setattr(Journal, "append", refuse)
        assert "the journal takes no lines" in log.flush()
        assert log.flush() is None, "one message for each time that it begins"
    log.add(steps[2])
    assert log.flush() is None
    assert [step.step for step in read_journal(tmp_path)] == [1, 2, 3]


def refuse(*_arguments, **_named):
    raise EnvironmentFailure("the disk is full")


def test_a_moved_run_has_its_journal_and_evaluations(tiny_base, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "evaluations.jsonl").write_text("{}\n")
    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "here", before=dies_at(8)).run()
    shutil.copytree(tmp_path / "here" / "checkpoints", tmp_path / "there" / "checkpoints")
    make_loop(tiny_base, tmp_path / "there").run()
    assert [step.step for step in read_journal(tmp_path / "there")] == list(range(1, 9))
    assert (tmp_path / "there" / "evaluations.jsonl").read_text() == "{}\n"


def test_every_attempt_is_in_the_account_of_what_was_done_again(tiny_base, tmp_path):
    for number in (3, 6, 8):
        with pytest.raises(Killed):
            make_loop(tiny_base, tmp_path, before=dies_at(number)).run()
    replay = make_loop(tiny_base, tmp_path).run()
    assert replay == (2 + 2 + 1, True)
    # A step that came out otherwise long before the last attempt is still found.
    path = tmp_path / "steps.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    path.write_text("\n".join([json.dumps(first | {"loss": first["loss"] + 1e-9}), *lines[1:]]) + "\n")
    assert make_loop(tiny_base, tmp_path).run() == (5, False)


def test_weights_are_hashed_only_where_it_costs_nothing_or_is_due(tiny_base, tmp_path):
    settings = SETTINGS.model_copy(update={"eval": EvalSettings(every=4)})
    loop = make_loop(tiny_base, tmp_path, settings=settings)
    digest = loop._engine.digest

    def slow():
        time.sleep(0.1)
        return digest()

    loop._engine.digest = slow
    loop._digest_is_cheap = False
    loop.run()
    assert [step.step for step in read_steps(tmp_path) if step.weights] == [3, 4, 6, 8]
