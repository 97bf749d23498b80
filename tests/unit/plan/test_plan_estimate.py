"""A plan is computed before anything is loaded, holds its value in its range, and moves the right way."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.costmodel.cpu_step import training_flops
from graftwork.model.shape import adapter_parameters, read_shape, total_parameters
from graftwork.plan.estimate import PlanInputs, make_plan
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import Figure
from graftwork.records.plan import DeviceFacts, ModelShape, RolloutLoad, Tuning, Workload

SMOL = ModelShape(
    name="smollm2",
    hidden_size=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    tied_embeddings=True,
    max_positions=8192,
)
DEVICE = DeviceFacts(kind="cpu", name="test", memory_gib=16, threads=2, gflops=100, certainty="probed")
TARGETS = ("q_proj", "v_proj")


def workload(**changes):
    values = {
        "lengths": (120,) * 40,
        "trained_tokens": 1000,
        "batch_size": 8,
        "epochs": 2,
        "rank": 8,
        "targets": TARGETS,
        "adapted_layers": 15,
    }
    return Workload(**{**values, **changes})


def plan(work=None, **changes):
    values = {"settings": PlanSettings(), "device": DEVICE, "learned": ()}
    return make_plan(
        PlanInputs(
            base="smollm2",
            base_fingerprint="f",
            dataset_hash="d",
            shape=SMOL,
            work=work or workload(),
            train={},
            **{**values, **changes},
        )
    )


def test_parameters_are_counted_as_the_real_model_counts_them(embedded_base):
    shape = read_shape(Path(embedded_base.folder))
    assert total_parameters(shape) == 134_515_008
    assert shape.model_copy(update={"name": "smollm2"}) == SMOL


def test_adapter_parameters_are_those_that_are_trained(tiny_base):
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.load import load_base

    shape = read_shape(tiny_base)
    parameters = attach(
        load_base(tiny_base), AdapterShape(rank=4, alpha=8, targets=TARGETS, layers=(1,)), seed=0
    )
    counted = sum(parameter.numel() for parameter in parameters)
    assert adapter_parameters(shape, rank=4, targets=TARGETS, layers=1) == counted


def test_steps_and_tokens_are_exact():
    made = plan(workload(lengths=(100,) * 41, epochs=3))
    assert made.steps == Figure.exact(18, "steps")
    assert made.tokens.value == 12_300


@given(
    rows=st.integers(1, 200),
    length=st.integers(8, 2000),
    batch=st.integers(1, 32),
    layers=st.integers(1, 30),
    rank=st.integers(1, 128),
)
def test_more_work_never_takes_less(rows, length, batch, layers, rank):
    work = workload(
        lengths=(length,) * rows, trained_tokens=5 * rows, batch_size=batch, adapted_layers=layers, rank=rank
    )
    grown = {"lengths": (length + 1,) * (rows + 1), "trained_tokens": 5 * (rows + 1)}
    small, large = plan(work), plan(work.model_copy(update=grown))
    for name in ("peak_memory_gib", "minutes", "tokens", "steps"):
        assert getattr(large, name).value >= getattr(small, name).value
        figure = getattr(small, name)
        assert figure.low <= figure.value <= figure.high


def test_frozen_lower_layers_save_backward_work():
    assert training_flops(SMOL, workload(adapted_layers=15)) < training_flops(
        SMOL, workload(adapted_layers=30)
    )


def test_certainty_is_named_and_narrows():
    def width(made):
        return made.minutes.high / made.minutes.low

    guessed = plan(device=DEVICE.model_copy(update={"gflops": None, "certainty": "computed"}))
    probed, learned = plan(), plan(learned=(150.0, 160.0, 170.0))
    assert [made.certainty for made in (guessed, probed, learned)] == ["computed", "probed", "learned"]
    assert width(guessed) > width(probed) > width(learned)
    assert learned.tokens_per_second.value == 160.0


def test_a_plan_that_does_not_fit_says_what_to_change():
    tight = plan(settings=PlanSettings(memory_limit_gib=0.5))
    assert not tight.fits
    assert any("train.batch_size" in note for note in tight.notes)
    slow = plan(settings=PlanSettings(time_limit_minutes=0.01))
    assert not slow.fits
    assert any("train.epochs" in note for note in slow.notes)


def test_a_speed_that_was_measured_on_a_busy_machine_is_named():
    busy = DEVICE.model_copy(update={"core_share": 0.15})
    assert any("15% of the 2 cores" in note for note in plan(device=busy).notes)
    free = DEVICE.model_copy(update={"core_share": 0.97})
    for quiet in (plan(device=free), plan(), plan(device=busy, learned=(150.0, 160.0, 170.0))):
        assert not any("of the 2 cores" in note for note in quiet.notes)


BUSY = DEVICE.model_copy(update={"gflops": 15.0, "core_share": 0.15, "core_gflops": 50.0})


@pytest.mark.parametrize("learned", [(), (150.0, 160.0, 170.0)])
def test_the_range_of_a_busy_machine_holds_the_plan_of_the_free_one(learned):
    free = plan()
    busy = plan(device=BUSY, learned=learned)
    assert busy.minutes.low <= free.minutes.value <= busy.minutes.high
    assert busy.tokens_per_second.high == pytest.approx(free.tokens_per_second.high)
    assert plan(device=BUSY).minutes.value > 3 * free.minutes.value


def test_the_range_of_a_free_machine_stays_as_it_is():
    free = DEVICE.model_copy(update={"core_share": 0.97, "core_gflops": 80.0})
    speed = plan(device=free).tokens_per_second
    assert speed.high == pytest.approx(1.6 * speed.value)


def test_rollouts_on_a_busy_machine_reach_to_those_of_the_free_one():
    load = RolloutLoad(
        prompts=4, answers=4, prompt_tokens=100.0, max_tokens=48, answer_tokens=48.0, batches=5
    )
    busy, free = (plan(workload(rollouts=load), device=device).minutes for device in (BUSY, DEVICE))
    assert busy.low <= free.value <= busy.high


def test_a_figure_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="must hold the value"):
        Figure(value=3, low=1, high=2)


@pytest.mark.parametrize("limit", [20.3, 22.7, 16.1])
def test_the_peak_of_a_tuned_card_includes_sampled_answers_and_fits_the_limit_it_was_tuned_to(limit):
    sampled = 3.1
    tuning = Tuning(
        form="whole",
        head="whole",
        micro_tokens=4096,
        longest=120,
        keep=30,
        lean=0,
        chunk_tokens=1024,
        head_tokens=256,
        turned=False,
        host_embedding=False,
        limit_gib=limit - sampled,
        peak_gib=9.0,
        seconds_per_token=1e-5,
        sampling_gib=sampled,
    )
    card = DEVICE.model_copy(update={"kind": "cuda", "memory_gib": 80.0})
    answers = RolloutLoad(prompts=5, answers=8, prompt_tokens=80, max_tokens=40, answer_tokens=26)
    made = plan(
        workload(rollouts=answers),
        device=card,
        tuning=tuning,
        settings=PlanSettings(memory_limit_gib=limit),
    )
    assert made.peak_memory_gib.value == pytest.approx(12.1)
    assert made.peak_memory_gib.high == pytest.approx(limit)
    assert made.fits


def test_answers_of_a_server_are_not_in_the_minutes_and_the_plan_says_so():
    answers = RolloutLoad(prompts=5, answers=8, prompt_tokens=80, max_tokens=40, answer_tokens=26)
    here, there = (
        plan(workload(rollouts=answers.model_copy(update={"on_server": is_there}), batch_size=40, epochs=1))
        for is_there in (False, True)
    )
    assert here.parts["minutes.rollouts"].value > 0
    assert "minutes.rollouts" not in there.parts
    # The trainer computes the probabilities of the server's answers once more.
    assert there.parts["minutes.compute"].value > here.parts["minutes.compute"].value
    assert any("the server writes its answers" in note for note in there.notes)
