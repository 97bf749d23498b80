"""The type by what the device has; float16 with a scale that finds its own size and survives a kill."""

import math

import pytest
import torch
from cpu_rows import make_rows
from hypothesis import given
from hypothesis import strategies as st

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import load_base
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.engine import LARGEST_SCALE, SMALLEST_SCALE, LossScaler, TrainingEngine
from graftwork.train.engine_choice import choose_precision, has_amx
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import TrainSettings

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
SETTINGS = TrainSettings(
    rank=4, alpha=8, epochs=2, batch_size=4, learning_rate=2e-2, checkpoint_every=3, threads=1
)


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"kind": "cpu", "amx": False}, "float32"),
        ({"kind": "cpu", "amx": True}, "bfloat16"),
        ({"kind": "cuda", "capability": 9.0}, "bfloat16"),
        ({"kind": "cuda", "capability": 8.0}, "bfloat16"),
        ({"kind": "cuda", "capability": 7.5}, "float16"),
        ({"kind": "cuda", "capability": None}, "float16"),
    ],
)
def test_the_type_is_what_the_device_computes_fast_and_safely(facts, chosen):
    assert choose_precision("auto", **facts) == chosen


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_a_precision_asked_for_by_name_is_used(asked):
    assert choose_precision(asked, kind="cpu") == asked
    assert choose_precision(asked, kind="cuda", capability=9.0) == asked


def test_bfloat16_without_matrix_units_does_not_count():
    assert not has_amx("flags\t\t: fpu avx512_bf16 avx512f\n")
    assert not has_amx("flags : amx_tile amx_bf16\nflags : avx512f\n")
    assert not has_amx("")
    assert has_amx("processor : 0\nflags : amx_tile amx_bf16 fpu\nflags : fpu amx_bf16 amx_tile\n")


def test_the_scale_grows_after_enough_good_steps_and_halves_at_an_overflow():
    scaler = LossScaler(on=True, first=8.0, grow_every=3)
    for expected in (8.0, 8.0, 16.0, 16.0):
        scaler.went_well()
        assert scaler.factor == expected
    scaler.overflowed()
    assert scaler.factor == 8.0
    # The count restarts: two good steps are not three.
    scaler.went_well()
    scaler.went_well()
    assert scaler.factor == 8.0


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 5), st.integers(0, 200))
def test_the_scale_stays_in_its_bounds_and_goes_on_exactly_where_it_was(goods, grow_every, cut):
    def go(scaler, events):
        for good in events:
            scaler.went_well() if good else scaler.overflowed()
            assert SMALLEST_SCALE <= scaler.factor <= LARGEST_SCALE
        return scaler

    whole = go(LossScaler(on=True, grow_every=grow_every), goods)
    first = go(LossScaler(on=True, grow_every=grow_every), goods[:cut])
    second = LossScaler(on=True, grow_every=grow_every)
    second.restore(first.state())
    go(second, goods[cut:])
    assert (second.factor, second._good) == (whole.factor, whole._good)


def test_types_that_need_no_scale_have_none():
    scaler = LossScaler(on=False)
    scaler.went_well()
    assert scaler.factor == 1.0
    assert not scaler.can_fall
    assert scaler.state() == {}


class Killed(BaseException):
    """Stands in for kill -9."""


class Before(TrainingCallback):
    def __init__(self, call):
        self._call = call

    def on_step_begin(self, number, steps):
        self._call(number, steps)


def make_loop(tiny_base, folder, *, first_factor=2.0**24, before=None, dtype="float16", settings=SETTINGS):
    torch.set_num_threads(1)
    model = load_base(tiny_base, dtype=dtype)
    engine = TrainingEngine(model, attach(model, SHAPE, seed=SETTINGS.seed), settings=settings)
    if dtype == "float16":
        engine._scaler = LossScaler(on=True, first=first_factor, grow_every=4)
    callbacks = [Before(before)] if before else []
    return TrainingLoop(
        engine,
        EpochOrder(make_rows(16, seed=2), settings=settings),
        RunContext(settings, folder),
        callbacks=callbacks,
    )


def test_float16_learns_what_float32_learns(tiny_base, tmp_path):
    half = make_loop(tiny_base, tmp_path / "half", first_factor=2.0**10)
    half.run()
    full = make_loop(tiny_base, tmp_path / "full", dtype="float32")
    full.run()
    ours, theirs = read_steps(tmp_path / "half"), read_steps(tmp_path / "full")
    assert ours[-1].loss < ours[0].loss - 0.1
    for one, other in zip(ours, theirs, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-2)
    assert all(tensor.dtype == torch.float32 for tensor in half._engine.learned().values())


def test_an_overflow_is_computed_again_with_a_smaller_scale_and_loses_no_step(tiny_base, tmp_path):
    # So large that the first gradients cannot be held in float16.
    # A checkpoint at every step, so that every step records the digest of its weights.
    settings = SETTINGS.model_copy(update={"checkpoint_every": 1})
    loop = make_loop(tiny_base, tmp_path, first_factor=2.0**24, settings=settings)
    weights = [loop._engine.digest()]
    loop.run()
    steps = read_steps(tmp_path)
    weights += [step.weights for step in steps]
    assert len(set(weights)) == len(steps) + 1
    assert all(step.gradient_norm > 0 for step in steps)
    assert loop._engine._scaler.factor < 2.0**24
    assert all(math.isfinite(step.loss) for step in steps)


@pytest.mark.parametrize("killed_before", [2, 5])
def test_a_killed_float16_run_goes_on_to_the_same_bytes(tiny_base, tmp_path, killed_before):
    whole = make_loop(tiny_base, tmp_path / "whole")
    whole.run()

    def die(step, _steps):
        if step == killed_before:
            raise Killed

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", before=die).run()
    resumed = make_loop(tiny_base, tmp_path / "cut")
    resumed.run()
    assert resumed._engine.digest() == whole._engine.digest()
    assert resumed._engine._scaler.factor == whole._engine._scaler.factor


def test_a_gradient_that_no_scale_can_save_is_not_taken_for_an_overflow(tiny_base, tmp_path):
    loop = make_loop(tiny_base, tmp_path, first_factor=SMALLEST_SCALE)
    engine = loop._engine
    clip = engine.strategy.clip_gradients

    def clip_spoiled(most):
        engine.parameters[0].grad.fill_(float("inf"))
        return clip(most)

    engine.strategy.clip_gradients = clip_spoiled
    measured = engine.backward(make_rows(4))
    assert not measured.overflowed
    assert not math.isfinite(measured.gradient_norm)
