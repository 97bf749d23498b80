"""The cached trunk changes nothing: same losses, same bytes, warm, cold, on disk or not at all."""

import pytest
import torch
from cpu_rows import make_rows

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import load_base
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.cpu.step import (
    CpuStep,
    FileCache,
    FrozenLayers,
    HiddenStateCache,
    MemoryCache,
    number_rows,
    shared_prefix,
)
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import TrainSettings

SETTINGS = TrainSettings(
    rank=4, alpha=8, epochs=3, batch_size=4, learning_rate=5e-2, checkpoint_every=3, threads=1
)
SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(1,))


class Killed(BaseException):
    """Stands in for kill -9: nothing in the program catches it."""


class Before(TrainingCallback):
    """Calls back before each step."""

    def __init__(self, call):
        self._call = call

    def on_step_begin(self, number, steps):
        self._call(number, steps)


def rows_with_beginning():
    return make_rows(16, shared=30)


def places(rows, folder):
    skipped = len(shared_prefix(rows)) + 1
    lengths = tuple(len(tokens) - skipped for tokens in number_rows(rows))
    return {
        "nowhere": HiddenStateCache(),
        "memory": MemoryCache(),
        "file": FileCache(folder, lengths=lengths, width=64, dtype=torch.float32),
    }


def make_loop(tiny_base, folder, states, *, before=None):
    torch.set_num_threads(1)
    rows = rows_with_beginning()
    model = load_base(tiny_base)
    parameters = attach(model, SHAPE, seed=SETTINGS.seed)
    way = CpuStep(model, 1, rows, states=states, packed=True)
    engine = TrainingEngine(model, parameters, settings=SETTINGS, step=StepOptions(logits=way.logits))
    callbacks = [Before(before)] if before else []
    return TrainingLoop(
        engine, EpochOrder(rows, settings=SETTINGS), RunContext(SETTINGS, folder), callbacks=callbacks
    )


def run(tiny_base, folder, states):
    loop = make_loop(tiny_base, folder, states)
    loop.run()
    return loop._engine.digest(), [step.loss for step in read_steps(folder)]


@pytest.mark.parametrize("place", ["memory", "file"])
def test_with_and_without_the_cache_a_run_ends_in_the_same_bytes(tiny_base, tmp_path, place):
    states = places(rows_with_beginning(), tmp_path)[place]
    assert run(tiny_base, tmp_path / "kept", states) == run(tiny_base, tmp_path / "not", HiddenStateCache())


@pytest.mark.parametrize("killed_before", [3, 6, 8, 11])
def test_a_resumed_run_whose_cache_is_cold_ends_in_the_same_bytes(tiny_base, tmp_path, killed_before):
    whole = run(tiny_base, tmp_path / "whole", MemoryCache())

    def die(step, _steps):
        if step == killed_before:
            raise Killed

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", MemoryCache(), before=die).run()
    assert run(tiny_base, tmp_path / "cut", MemoryCache()) == whole


def test_the_states_of_a_row_are_a_function_of_the_row_alone(tiny_base):
    torch.set_num_threads(1)
    model, rows = load_base(tiny_base), rows_with_beginning()
    forwards = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    backwards = FrozenLayers(model.model, 1, rows, states=HiddenStateCache(), packed=True)
    first = [forwards.read(row) for row in rows]
    again = [forwards.read(row) for row in rows]
    other = [backwards.read(row) for row in reversed(rows)][::-1]
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_the_states_are_what_transformers_passes_to_that_block(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    for row in rows[:3]:
        hidden = model.model(torch.tensor([row.tokens[:-1]]), output_hidden_states=True).hidden_states[1]
        assert torch.allclose(trunk.read(row), hidden[0], atol=1e-5)


def test_a_row_that_the_run_does_not_know_is_read_all_the_same(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    stranger = make_rows(1, shared=0)[0]
    hidden = model.model(torch.tensor([stranger.tokens[:-1]]), output_hidden_states=True).hidden_states[1]
    assert torch.allclose(trunk.read(stranger), hidden[0], atol=1e-5)


def test_each_row_is_computed_once_however_often_it_is_asked_for(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, [*rows, rows[0]], states=MemoryCache(), packed=False)
    passes = []
    through = trunk._pass
    trunk._pass = lambda tokens, before: passes.append(tokens) or through(tokens, before)
    for _ in range(3):
        for row in rows:
            trunk.read(row)
    assert len(passes) == len(rows) + 1  # and the beginning


def test_the_file_leaves_nothing_behind(tmp_path):
    states = FileCache(tmp_path, lengths=(2, 3), width=4, dtype=torch.float32)
    assert states.get(1) is None
    states.put(1, torch.full((3, 4), 7.0))
    assert torch.equal(states.get(1), torch.full((3, 4), 7.0))
    assert states.get(0) is None
    assert list(tmp_path.iterdir()) == []
