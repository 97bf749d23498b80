"""The estimate of a plan: parameters, targets, passes of the plain step, ranges."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.cpu_step import choose_host_micro_batches, training_flops
from graftwork.costmodel.plain_step import PlainRun
from graftwork.costmodel.rates import rates_of
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.shape import adapter_parameters, linear_names, read_shape, total_parameters, trained_by
from graftwork.pipeline.steps.plan import describe_adapter
from graftwork.plan.catalog.hardware import default_rates, find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.estimate import PlanInputs, make_plan
from graftwork.plan.project import choose_micro_batches, distribution_of, needs_more
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import Figure
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine
from graftwork.records.plan import DeviceFacts, ModelShape, PlainStep, RolloutLoad, Tuning, Workload
from graftwork.train.settings import TrainSettings

SMOL = find_model("smollm2-135m").shape
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
    assert shape.model_copy(update={"name": SMOL.name}) == SMOL


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
        workload(rollouts=answers), device=card, tuning=tuning, settings=PlanSettings(memory_limit_gib=limit)
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


LLAMA = ModelShape(
    name="llama",
    hidden_size=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=300,
    tied_embeddings=True,
    max_positions=128,
)
NEOX = LLAMA.model_copy(update={"linears": {"query_key_value": (64, 192), "dense": (64, 64)}})


def resolve(shape=LLAMA, **settings):
    return AdapterShape.model_validate(describe_adapter(TrainSettings.model_validate(settings), shape))


def test_all_means_every_linear_layer_of_the_base_at_hand():
    assert resolve().targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert resolve(NEOX).targets == ("query_key_value", "dense")


def test_settings_become_a_shape():
    made = resolve(
        rank=4,
        alpha=10,
        use_rslora=True,
        method="dora",
        upper_layers=2,
        modules={"q_proj": {"rank": 2}, "up_proj": {"alpha": 3}},
    )
    assert (made.kind, made.layers, made.use_rslora) == ("dora", (2, 3), True)
    assert (made.ranks, made.alphas) == ({"q_proj": 2}, {"up_proj": 3.0})
    assert made.scale_of("model.layers.3.self_attn.q_proj") == pytest.approx(10 / 2**0.5)
    assert made.scale_of("model.layers.3.mlp.up_proj") == pytest.approx(3 / 4**0.5)
    assert resolve(method="qlora").kind == "lora"
    assert resolve(method="full").kind == "full"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"target_modules": ["q_prj"]}, "did you mean 'q_proj'?"),
        ({"target_modules": ["q_proj"], "modules": {"k_proj": {"rank": 2}}}, "did you mean 'q_proj'?"),
        ({"target_modules": ["zzz"]}, "set `train.target_modules` to names of its linear layers"),
    ],
)
def test_a_name_that_no_layer_has_is_refused_with_the_nearest(settings, hint):
    with pytest.raises(UserError, match="no layer of the model") as caught:
        resolve(**settings)
    assert caught.value.fix == hint


MODEL = find_model("deepseek-coder-6.7b")
SHAPE = MODEL.shape
SHORT = SHAPE.model_copy(update={"layers": 4, "parameters": None})
CARD = DeviceFacts(kind="cuda", name="a card", memory_gib=15.57, threads=8, capability=12.0)


def load(method="qlora", *, tokens=2048, rows=16, **more):
    values = {
        "lengths": (tokens,) * 64,
        "trained_tokens": 64 * tokens // 2,
        "batch_size": rows,
        "epochs": 1,
        "rank": 16,
        "targets": linear_names(SHAPE),
        "adapted_layers": SHAPE.layers,
        "method": method,
        "most_replies": rows * tokens // 2,
    }
    return Workload(**{**values, **more})


def choose(work=None, *, shape=SHAPE, limit=14.6, strategy="ddp", processes=2, rates=None, **more):
    work = work or load()
    shared = distribution_of(strategy, processes)
    run = PlainRun(
        shape=shape,
        architecture=MODEL.architecture,
        trainable=trained_by(shape, work),
        half="bfloat16",
        rates=rates or default_rates(),
        machine=Machine(gpu=None, gpus=shared.gpus, ram_gib=64.0),
    )
    return choose_micro_batches(run, work, shared, limit_gib=limit, **more)


def test_two_cards_of_16_gb_train_a_7b_in_four_bits_because_blocks_compute_again():
    found, without = choose(), choose(checkpointing="off")
    assert found.checkpointed
    assert not needs_more(found, limit_gib=14.6)
    assert needs_more(without, limit_gib=14.6)
    assert without.micro_rows == 1


def test_nothing_is_computed_again_where_there_is_room():
    found = choose(limit=70.0)
    assert not found.checkpointed
    assert not needs_more(found, limit_gib=70.0)
    assert choose(limit=70.0, checkpointing="on").checkpointed


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_every_number_of_processes_is_planned(strategy, method):
    found = choose(load(method, tokens=512, adapted_layers=4), shape=SHORT, strategy=strategy, limit=23.0)
    assert found.peak_gib > 0
    assert found.seconds_per_token
    assert 1 <= found.micro_rows <= 16 // (1 if strategy == "single" else 2)


@given(st.floats(2, 20), st.floats(1.05, 3), st.sampled_from(["qlora", "dora", "full"]))
@settings(max_examples=6, deadline=None)
def test_more_memory_is_never_slower(limit, more, method):
    work = load(method, tokens=512, adapted_layers=4)
    small, large = (choose(work, shape=SHORT, limit=gib, strategy="single") for gib in (limit, limit * more))
    if not needs_more(small, limit_gib=limit):
        assert not needs_more(large, limit_gib=limit * more)
        assert large.seconds_per_token <= small.seconds_per_token * 1.0001


def test_the_beginning_that_rows_share_is_held_once_where_nothing_is_computed_again():
    apart, shared = (
        choose(load(shared_tokens=tokens), limit=70, checkpointing="off") for tokens in (0, 1536)
    )
    assert shared.peak_gib / shared.micro_rows < apart.peak_gib / apart.micro_rows


def test_a_processor_takes_as_many_rows_as_it_has_room_for():
    shape = find_model("smollm2-135m").shape
    work = load("lora", tokens=1024, targets=("q_proj", "v_proj"), adapted_layers=shape.layers)
    assert choose_host_micro_batches(shape, work, limit_gib=64.0, width=4) is None
    few = choose_host_micro_batches(shape, work, limit_gib=8.0, width=4)
    assert few is not None
    assert few.micro_rows < 16
    assert few.peak_gib * 1.2 <= 8.0
    again = choose_host_micro_batches(shape, work, limit_gib=8.0, width=4, checkpointed=True)
    assert again is not None
    assert again.micro_rows > few.micro_rows


def make(plain=None, **more):
    facts = {
        "base": "b",
        "base_fingerprint": "f",
        "dataset_hash": "d",
        "shape": SHAPE,
        "work": load(),
        "device": CARD,
        "settings": PlanSettings(),
        "train": {},
        "dtype": "bfloat16",
        "plain": plain,
    }
    return make_plan(PlanInputs(**{**facts, **more}))


def test_a_plan_says_how_the_plain_step_is_taken_and_promises_its_memory():
    found = choose()
    plan = make(found)
    assert plan.plain == found
    assert plan.peak_memory_gib.value == pytest.approx(found.peak_gib)
    assert plan.fits
    assert f"{found.micro_rows} rows at a time, with activation checkpointing" in plan.notes[0]
    assert plan.train == {}, "how rows are gone through does not name the run"


def test_a_card_that_is_known_is_estimated_by_its_own_rates():
    slow, quick = (rates_of(find_gpu(name)) for name in ("RTX 4060 Ti 16GB", "RTX 4080"))
    plans = [make(choose(rates=rates), rates=rates) for rates in (slow, quick)]
    assert plans[0].tokens_per_second.value < 0.7 * plans[1].tokens_per_second.value
    assert all(plan.certainty == "computed" for plan in plans)
    probed = quick.model_copy(update={"certainty": "probed"})
    sure = make(choose(rates=probed), rates=probed)
    assert sure.certainty == "probed"
    wide, narrow = plans[1].tokens_per_second, sure.tokens_per_second
    assert narrow.high / narrow.low < wide.high / wide.low


def test_a_plan_of_earlier_versions_is_read():
    plan = make(PlainStep(micro_rows=1, peak_gib=1.0))
    body = plan.model_dump(mode="json")
    del body["plain"]
    assert type(plan).model_validate(body).plain is None
