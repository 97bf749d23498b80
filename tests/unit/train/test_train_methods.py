"""The real worker trains every method, leaves what loads again, and resumes it to the same bytes."""

import json
from pathlib import Path

import pytest
import torch
from sample_plans import make_plan, make_tuning
from test_train_loop import make_rows

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import activate, load_adapter
from graftwork.model.base import EMBEDDED, HUB_ID
from graftwork.model.load import base_files_digest, load_base
from graftwork.records.errors import UserError
from graftwork.records.plan import StreamedStep
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.train import worker
from graftwork.train.engine_choice import starts_on_host, streams_layers
from graftwork.train.loss import mean_loss
from graftwork.train.settings import TrainSettings

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
METHODS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"method": "dora"},
    "qlora": {"method": "qlora"},
    "full": {"method": "full", "learning_rate": 5e-3},
    "full, upper": {"method": "full", "learning_rate": 5e-3, "upper_layers": 1},
    "full, streamed": {"method": "full", "learning_rate": 5e-3, "offload": True},
}
STREAMED = StreamedStep(micro_rows=2, dtype="float32", limit_gib=1, peak_gib=1, host_gib=1)


class Killed(BaseException):
    """Stands in for kill -9: nothing in the program catches it."""


def make_job(base, folder, *, method, start=None, **changes):
    values = {"rank": 4, "alpha": 8, "epochs": 2, "batch_size": 4, "learning_rate": 5e-2, "threads": 1}
    settings = TrainSettings.model_validate(
        {**values, "checkpoint_every": 3, "validation_rows": 4, **METHODS[method], **changes}
    )
    shape = AdapterShape(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=ALL,
        layers=(1,) if settings.upper_layers else (0, 1),
        use_rslora=settings.use_rslora,
        kind="lora" if settings.method == "qlora" else settings.method,
    )
    plan = make_plan(
        base="tiny",
        method=settings.method,
        streamed=STREAMED if streams_layers(settings) else None,
        train={"settings": settings.what_is_learned(), "adapter": shape.model_dump(mode="json")},
    )
    folder.mkdir(parents=True, exist_ok=True)
    return TrainJob(
        run_id="run",
        folder=str(folder),
        base_folder=str(base),
        dataset_folder="rows",
        plan=plan,
        endpoint=settings.endpoint_access(),
        run=settings.run.model_dump(mode="json"),
        keeping=settings.keeping(),
        crew=settings.distribution(),
        start_adapter=str(start) if start else None,
    )


@pytest.fixture(autouse=True)
def _rows(monkeypatch):
    """The worker as it is, but for the rows, which need no dataset folder here."""
    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: make_rows())
    yield
    torch.use_deterministic_algorithms(False)


def train(job):
    worker.train(job)
    return TrainOutcome.from_json((Path(job.folder) / "outcome.json").read_bytes())


@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns_and_what_it_leaves_answers_as_it_did(tiny_base, tmp_path, method):
    outcome = train(make_job(tiny_base, tmp_path / "run", method=method))
    assert outcome.final_loss < outcome.first_loss - 0.2
    assert outcome.validation_loss_after < outcome.validation_loss_before - 0.2
    assert outcome.base_hash_before == outcome.base_hash_after
    assert outcome.base_proof == ("files" if method.startswith("full") else "memory")
    # Evaluation and serving load the base again, and next to it what was learned.
    model = load_base(tiny_base, four_bits=method == "qlora")
    load_adapter(model, Path(outcome.adapter_folder))
    again = mean_loss(model, make_rows()[:4], batch_size=8, device="cpu")
    assert again == pytest.approx(outcome.validation_loss_after, rel=1e-5)
    activate(model, None)
    plain = mean_loss(model, make_rows()[:4], batch_size=8, device="cpu")
    assert plain == pytest.approx(outcome.validation_loss_before, rel=1e-5)


def test_an_adapter_of_the_embedded_base_names_an_id_that_peft_can_load(tiny_base, tmp_path):
    """The tensors are those of any other name."""
    job = make_job(tiny_base, tmp_path / "run", method="lora")
    other = make_job(tiny_base, tmp_path / "other", method="lora")
    embedded = other.model_copy(update={"plan": other.plan.model_copy(update={"base": EMBEDDED})})
    plain, named = (Path(train(settings).adapter_folder) for settings in (job, embedded))
    config = json.loads((named / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == HUB_ID
    weights = "adapter_model.safetensors"
    assert (plain / weights).read_bytes() == (named / weights).read_bytes()


@pytest.mark.parametrize("method", ["dora", "qlora", "full", "full, streamed"])
def test_a_killed_run_comes_to_the_same_bytes(tiny_base, tmp_path, method, monkeypatch):
    whole = train(make_job(tiny_base, tmp_path / "whole", method=method))
    from graftwork.train.engine import TrainingEngine

    apply, count = TrainingEngine.apply, iter(range(100))

    def die(self, rate):
        if next(count) == 4:
            raise Killed
        apply(self, rate)

    monkeypatch.setattr(TrainingEngine, "apply", die)
    with pytest.raises(Killed):
        train(make_job(tiny_base, tmp_path / "cut", method=method))
    monkeypatch.setattr(TrainingEngine, "apply", apply)
    resumed = train(make_job(tiny_base, tmp_path / "cut", method=method))
    assert resumed.restarts == 1
    assert resumed.adapter_hash == whole.adapter_hash


def test_full_training_leaves_the_bases_files_alone(tiny_base, tmp_path):
    before = base_files_digest(tiny_base)
    outcome = train(make_job(tiny_base, tmp_path / "run", method="full"))
    assert outcome.base_hash_after == before == base_files_digest(tiny_base)
    assert outcome.trainable_parameters == sum(p.numel() for p in load_base(tiny_base).parameters())


@pytest.mark.parametrize("method", ["dora", "full"])
def test_training_goes_on_from_what_an_earlier_run_left(tiny_base, tmp_path, method):
    first = train(make_job(tiny_base, tmp_path / "first", method=method))
    start = Path(first.adapter_folder)
    second = train(make_job(tiny_base, tmp_path / "second", method=method, start=start, epochs=1))
    assert second.first_loss < first.first_loss - 0.2
    assert second.started_from == first.adapter_hash


def test_an_adapter_of_another_rank_is_no_start(tiny_base, tmp_path):
    first = train(make_job(tiny_base, tmp_path / "first", method="lora", epochs=1))
    start = Path(first.adapter_folder)
    assert json.loads((start / "adapter_config.json").read_text())["r"] == 4
    with pytest.raises(UserError, match="a different shape"):
        train(make_job(tiny_base, tmp_path / "second", method="lora", start=start, rank=8))


def test_full_weights_stay_in_float32_where_products_are_bfloat16(tiny_base, tmp_path):
    from safetensors.torch import load_file

    whole = make_job(tiny_base, tmp_path / "whole", method="full")
    mixed = make_job(tiny_base, tmp_path / "mixed", method="full")
    mixed = mixed.model_copy(update={"plan": mixed.plan.model_copy(update={"dtype": "bfloat16"})})
    one, other = train(whole), train(mixed)
    assert other.final_loss != one.final_loss
    assert other.final_loss == pytest.approx(one.final_loss, rel=0.02)
    tensors = load_file(Path(other.adapter_folder) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def on_gpu(job, **change):
    """The same run as the plan has it for a card; where there is none, its step runs uncompiled."""
    tuning = make_tuning(micro_tokens=64, longest=17, keep=1, lean=0, **change)
    return job.model_copy(update={"plan": job.plan.model_copy(update={"tuning": tuning})})


@pytest.mark.parametrize(("form", "near"), [("whole", 1e-4), ("eight", 0.05)])
def test_the_step_of_a_card_learns_what_the_plain_one_learns(tiny_base, tmp_path, form, near):
    plain = train(make_job(tiny_base, tmp_path / "plain", method="lora"))
    card = train(on_gpu(make_job(tiny_base, tmp_path / "card", method="lora"), form=form))
    assert card.validation_loss_before == pytest.approx(plain.validation_loss_before, rel=near)
    assert card.validation_loss_after == pytest.approx(plain.validation_loss_after, rel=near)
    assert card.base_hash_before == card.base_hash_after
    model = load_base(tiny_base)
    load_adapter(model, Path(card.adapter_folder))
    again = mean_loss(model, make_rows()[:4], batch_size=8, device="cpu")
    assert again == pytest.approx(card.validation_loss_after, rel=near)


def test_a_killed_run_of_a_card_goes_on_to_the_same_adapter(tiny_base, tmp_path, monkeypatch):
    whole = train(on_gpu(make_job(tiny_base, tmp_path / "whole", method="qlora"), form="four"))
    from graftwork.train.gpu.engine import GpuEngine

    backward, count = GpuEngine.backward, iter(range(100))

    def die(self, rows):
        if next(count) == 5:
            raise Killed
        return backward(self, rows)

    monkeypatch.setattr(GpuEngine, "backward", die)
    with pytest.raises(Killed):
        train(on_gpu(make_job(tiny_base, tmp_path / "cut", method="qlora"), form="four"))
    monkeypatch.setattr(GpuEngine, "backward", backward)
    resumed = train(on_gpu(make_job(tiny_base, tmp_path / "cut", method="qlora"), form="four"))
    assert resumed.restarts == 1
    assert resumed.adapter_hash == whole.adapter_hash


def test_a_model_that_an_engine_places_on_the_device_is_not_called_before_that(
    tiny_base, tmp_path, monkeypatch
):
    """Its weights are in host memory, its rows would be on the device."""
    from graftwork.train import loss

    def called(*_arguments, **_named):
        raise AssertionError("the loss before training was computed on a model that is not on the device")

    job = make_job(tiny_base, tmp_path / "run", method="full, streamed")
    assert starts_on_host(job.plan, worker.job_settings(job))
    monkeypatch.setattr(loss, "mean_loss", called)
    assert train(job).validation_loss_before is not None


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_sharded_weights_start_in_host_memory(tiny_base, tmp_path, strategy):
    job = make_job(tiny_base, tmp_path / "run", method="full", strategy=strategy, offload=True)
    assert starts_on_host(job.plan, worker.job_settings(job))
    assert not streams_layers(worker.job_settings(job))
