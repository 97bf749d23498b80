"""The plain step is planned so that its first attempt fits: rows at a time, and blocks that compute again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.cpu_step import choose_host_micro_batches
from graftwork.costmodel.plain_step import PlainRun
from graftwork.costmodel.rates import rates_of
from graftwork.model.shape import linear_names, trained_by
from graftwork.plan.catalog.hardware import default_rates, find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.estimate import PlanInputs, make_plan
from graftwork.plan.project import choose_micro_batches, distribution_of, needs_more
from graftwork.plan.settings import PlanSettings
from graftwork.records.hardware import Machine
from graftwork.records.plan import DeviceFacts, PlainStep, Workload

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
