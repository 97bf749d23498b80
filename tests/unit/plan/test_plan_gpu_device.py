"""On a card the plan knows whose rates it uses, how the plain step is taken, and gives way."""

import json
from types import SimpleNamespace

import pytest

from graftwork.costmodel.rates import rates_of
from graftwork.costmodel.rollouts import sampling_gib
from graftwork.model.shape import linear_names
from graftwork.pipeline.steps import train as train_step
from graftwork.plan import project as step
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.estimate import PlanInputs, make_plan, tokens_per_second
from graftwork.plan.fit import project as project_fit
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import make_question
from graftwork.plan.settings import PlanSettings
from graftwork.records.errors import NegativeResult
from graftwork.records.plan import DeviceFacts, FitOptions, PlainStep, RolloutLoad, Workload
from graftwork.records.run import TrainJob
from graftwork.train.run_folder import REPLANNED
from graftwork.train.settings import TrainSettings

SHAPE = find_model("deepseek-coder-6.7b").shape.model_copy(update={"layers": 4, "parameters": None})
CARD = DeviceFacts(kind="cuda", name="NVIDIA GeForce RTX 4090", memory_gib=23.6, threads=8, capability=8.9)
LOAD = Workload(
    lengths=(1024,) * 32,
    trained_tokens=16 * 1024,
    batch_size=8,
    epochs=1,
    rank=16,
    targets=linear_names(SHAPE),
    adapted_layers=SHAPE.layers,
    method="dora",
    most_replies=4096,
)


def opened_project(tmp_path, *, limit=None, **train):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = SimpleNamespace(
        train=TrainSettings(method="dora", batch_size=8, **train), plan=PlanSettings(memory_limit_gib=limit)
    )
    return SimpleNamespace(
        settings=settings, base=SimpleNamespace(folder=str(tmp_path)), project=SimpleNamespace()
    )


@pytest.fixture
def unprobed(monkeypatch):
    monkeypatch.setattr(step, "stored_probe", lambda *_given, **_named: None)


def test_a_plan_counts_the_answers_that_the_start_reads_too():
    load = RolloutLoad(prompts=1, answers=8, prompt_tokens=512, max_tokens=512, answer_tokens=512, batches=4)
    plain = PlainStep(micro_rows=8, peak_gib=1.0, seconds_per_token=1e-4)

    def seconds_per_token(rows):
        work = LOAD.model_copy(update={"rollouts": load.model_copy(update={"reference_rows": rows})})
        rates = rates_of(find_gpu("RTX 4090"))
        return 1 / tokens_per_second(SHAPE, work, CARD, learned=(), plain=plain, rates=rates).value

    assert seconds_per_token(8) - seconds_per_token(0) == pytest.approx(1e-4 / 3)


def test_a_card_of_the_catalog_is_estimated_by_the_catalog(tmp_path, unprobed):
    assert step.gpu_rates(opened_project(tmp_path), CARD, SHAPE) == rates_of(find_gpu("RTX 4090"))


def test_a_card_that_nobody_knows_has_no_rates(tmp_path, unprobed):
    odd = CARD.model_copy(update={"name": "Zeta 9"})
    assert step.gpu_rates(opened_project(tmp_path), odd, SHAPE) is None
    assert step.gpu_rates(opened_project(tmp_path), CARD.model_copy(update={"kind": "cpu"}), SHAPE) is None


def test_a_stored_probe_goes_before_the_catalog(tmp_path, monkeypatch):
    probe = SimpleNamespace(device=SimpleNamespace(kind="cuda"))
    probed = rates_of(find_gpu("RTX 4090")).model_copy(update={"certainty": "probed"})
    monkeypatch.setattr(step, "stored_probe", lambda *_given, **_named: probe)
    monkeypatch.setattr(step, "rates_of_probe", lambda facts: probed if facts is probe else None)
    assert step.gpu_rates(opened_project(tmp_path), CARD, SHAPE) == probed

    def refuse(_facts):
        raise ValueError("the probe measured no products")

    monkeypatch.setattr(step, "rates_of_probe", refuse)
    assert step.gpu_rates(opened_project(tmp_path), CARD, SHAPE) == rates_of(find_gpu("RTX 4090"))


def test_dora_on_one_card_computes_again_where_it_would_not_fit(tmp_path):
    found = step.plan_passes(opened_project(tmp_path, limit=4.5), CARD, SHAPE, LOAD, "bfloat16", rates=None)
    assert found.checkpointed
    forbidden = opened_project(tmp_path, limit=4.5, gradient_checkpointing="off")
    with pytest.raises(NegativeResult, match="does not fit") as refused:
        step.plan_passes(forbidden, CARD, SHAPE, LOAD, "bfloat16", rates=None)
    assert "1 row at a time" in refused.value.why
    roomy = step.plan_passes(opened_project(tmp_path), CARD, SHAPE, LOAD, "bfloat16", rates=None)
    assert not roomy.checkpointed


def streamed_project(tmp_path, *, limit, **train):
    opened = opened_project(tmp_path, limit=limit)
    opened.settings.train = TrainSettings(method="full", offload=True, batch_size=8, **train)
    return opened


def test_the_plain_step_on_a_card_leaves_room_for_sampled_answers(tmp_path):
    answers = RolloutLoad(prompts=2, answers=4, prompt_tokens=512, max_tokens=512, answer_tokens=300)
    load = LOAD.model_copy(update={"rollouts": answers})
    sampled = sampling_gib(SHAPE, load)
    plans = []
    for work, limit in ((LOAD, 20.0 - sampled), (load, 20.0)):
        project = opened_project(tmp_path, limit=limit)
        plans.append(step.plan_passes(project, CARD, SHAPE, work, "bfloat16", rates=None))
    alone, between = plans
    assert sampled > 0.4
    assert between.parts_gib["rollouts"] == pytest.approx(sampled)
    assert between.peak_gib == pytest.approx(alone.peak_gib + sampled)
    assert (between.micro_rows, between.checkpointed) == (alone.micro_rows, alone.checkpointed)
    with pytest.raises(NegativeResult, match="GiB for sampled answers leave"):
        step.plan_passes(
            opened_project(tmp_path, limit=sampled + 0.5), CARD, SHAPE, load, "bfloat16", rates=None
        )


def test_answers_that_do_not_fit_together_are_sampled_in_rounds(tmp_path):
    answers = RolloutLoad(prompts=8, answers=8, prompt_tokens=512, max_tokens=512, answer_tokens=300)
    load = LOAD.model_copy(update={"rollouts": answers})
    together = {
        limit: step.plan_rollouts(
            opened_project(tmp_path, limit=limit), CARD, SHAPE, load, "bfloat16"
        ).rollouts.prompts_at_once
        for limit in (3.0, 8.0, 100.0)
    }
    assert together[3.0] == 1 < together[8.0] < together[100.0] == 8
    assert step.plan_rollouts(opened_project(tmp_path, limit=3.0), CARD, SHAPE, LOAD, "bfloat16") == LOAD


def test_a_plan_says_how_many_prompts_are_answered_at_a_time():
    answers = RolloutLoad(
        prompts=8, answers=8, prompt_tokens=512, max_tokens=512, answer_tokens=300, prompts_at_once=2
    )
    found = make_plan(
        PlanInputs(
            base="b",
            base_fingerprint="f",
            dataset_hash="d",
            shape=SHAPE,
            work=LOAD.model_copy(update={"rollouts": answers, "method": "lora"}),
            device=CARD.model_copy(update={"memory_gib": 200.0}),
            settings=PlanSettings(),
            train={},
            plain=PlainStep(micro_rows=8, peak_gib=9.0),
        )
    )
    assert found.prompts_at_once == 2
    assert any("2 of 8 prompts are answered at a time" in note for note in found.notes)


def test_the_plan_of_a_run_and_the_answer_of_fit_stream_the_same_step(tmp_path, monkeypatch):
    host = project_fit.this_host().model_copy(update={"ram_gib": 64.0})
    monkeypatch.setattr(step, "this_host", lambda: host)
    load = LOAD.model_copy(update={"method": "full", "trained_tokens": sum(LOAD.lengths)})
    gpu = find_gpu("RTX 4090")
    planned = step.plan_streamed(
        streamed_project(tmp_path, limit=6.0), CARD, SHAPE, load, "bfloat16", rates=rates_of(gpu)
    )
    machine = host.model_copy(update={"gpu": gpu, "gpus": 1})
    options = FitOptions(method="full", seq=1024, rows=32, batch_size=8, memory_limit_gib=6.0)
    model = find_model("deepseek-coder-6.7b").model_copy(update={"shape": SHAPE})
    answer = fit(make_question(model, options, machine=machine))
    assert answer.fits
    assert answer.strategy.streamed == planned
    assert answer.strategy.train["offload"]
    assert answer.strategy.train["strategy"] == "single"
    assert planned.peak_gib == pytest.approx(answer.peak_reserved_gib.value)
    assert step.as_plain(planned).micro_rows == planned.micro_rows


def test_layers_are_streamed_only_where_that_is_asked_for(tmp_path):
    found = step.plan_streamed(opened_project(tmp_path), CARD, SHAPE, LOAD, "bfloat16", rates=None)
    assert found is None


def test_what_the_host_has_no_room_for_is_refused(tmp_path, monkeypatch):
    host = project_fit.this_host().model_copy(update={"ram_gib": 8.0})
    monkeypatch.setattr(step, "this_host", lambda: host)
    load = LOAD.model_copy(update={"method": "full"})
    with pytest.raises(NegativeResult, match="of the host") as refused:
        step.plan_streamed(streamed_project(tmp_path, limit=8.0), CARD, SHAPE, load, "bfloat16", rates=None)
    assert "layers streamed" in refused.value.why


def make_job(tmp_path, *, plain=None, kind="cuda", keeping=None, distribution=None):
    plan = make_plan(
        PlanInputs(
            base="b",
            base_fingerprint="f",
            dataset_hash="d",
            shape=SHAPE,
            work=LOAD,
            device=CARD.model_copy(update={"kind": kind}),
            settings=PlanSettings(),
            train={"settings": {"batch_size": 8}},
            plain=plain,
        )
    )
    return TrainJob(
        run_id="r",
        folder=str(tmp_path),
        base_folder="x",
        dataset_folder="y",
        plan=plan,
        keeping=keeping or {"gradient_checkpointing": "auto"},
        crew=distribution or {"strategy": "single", "processes": 1},
    )


def test_memory_that_ran_out_halves_what_was_planned_not_what_a_step_has(tmp_path):
    job = make_job(tmp_path, plain=PlainStep(micro_rows=4, checkpointed=True, peak_gib=9.0))
    assert train_step.micro_batch_rows(job) == 4
    smaller, output, _ = train_step._take_less(job)
    assert train_step.micro_batch_rows(smaller) == 2
    (tmp_path / REPLANNED).write_text(json.dumps(output))
    assert train_step.micro_batch_rows(train_step.as_replanned(job)) == 2


def test_two_processes_have_half_of_a_step_each(tmp_path):
    job = make_job(tmp_path, kind="cpu", distribution={"strategy": "ddp", "processes": 2})
    assert train_step.micro_batch_rows(job) == 4


def test_with_one_row_at_a_time_blocks_compute_again_at_last(tmp_path):
    job = make_job(tmp_path, plain=PlainStep(micro_rows=1, peak_gib=9.0))
    smaller, output, word = train_step._take_less(job)
    assert smaller.keeping["gradient_checkpointing"] == "on"
    assert "activation checkpointing" in word
    assert train_step._take_less(smaller) is None
    (tmp_path / REPLANNED).write_text(json.dumps(output))
    assert train_step.as_replanned(job).keeping["gradient_checkpointing"] == "on"


@pytest.mark.parametrize(("kind", "asked"), [("cuda", "off"), ("cpu", "auto")])
def test_nothing_more_gives_way_where_it_was_forbidden_or_does_not_help(tmp_path, kind, asked):
    plain = PlainStep(micro_rows=1, peak_gib=9.0)
    assert (
        train_step._take_less(
            make_job(tmp_path, plain=plain, kind=kind, keeping={"gradient_checkpointing": asked})
        )
        is None
    )
