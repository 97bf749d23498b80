"""Plans and training agree on the step that a run takes, for every model that is known."""

import pytest

from graftwork.plan.catalog.hardware import find_cpu, find_gpu
from graftwork.plan.catalog.models import list_models
from graftwork.plan.fit.question import half_precision, kind_of, make_question, why_plain
from graftwork.plan.fit.search import takes_own_step
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions
from graftwork.train.engine_choice import choose_precision, why_plain_step
from graftwork.train.settings import TrainSettings

MACHINES = {
    "cpu": Machine(gpu=None, ram_gib=64.0, cpu=find_cpu("5950X")),
    "new GPU": Machine(gpu=find_gpu("H100 SXM"), gpus=1, ram_gib=64.0, cpu=find_cpu("5950X")),
    "old GPU": Machine(gpu=find_gpu("T4"), gpus=1, ram_gib=64.0, cpu=find_cpu("5950X")),
}


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("model", list_models(), ids=lambda model: model.name)
def test_a_fit_is_of_the_step_that_training_takes(model, method, where):
    machine = MACHINES[where]
    question = make_question(model, FitOptions(method=method), machine=machine)
    capability = None if machine.gpu is None else machine.gpu.capability
    precision = choose_precision("auto", kind=kind_of(question), capability=capability)
    assert precision == half_precision(question)
    trained = why_plain_step(
        TrainSettings(method=method),
        model.shape,
        device=kind_of(question),
        precision=precision,
        capability=capability,
    )
    assert why_plain(question) == trained
    assert takes_own_step(question) == (trained is None and where != "cpu")


@pytest.mark.parametrize(
    ("device", "changes", "why"),
    [
        ("cuda", {"packing": "off"}, "packing is off"),
        ("cuda", {"strategy": "ddp", "processes": 2}, "several devices"),
        ("cpu", {"strategy": "ddp", "processes": 2}, "several devices"),
        ("cpu", {"gradient_checkpointing": "on"}, "checkpoints activations"),
        ("cpu", {"packing": "off"}, None),
        ("cuda", {"gradient_checkpointing": "on"}, None),
    ],
)
def test_settings_choose_the_plain_step(device, changes, why):
    shape = next(model.shape for model in list_models() if model.name == "smollm2-135m")
    precision = "float32" if device == "cpu" else "bfloat16"
    settings = TrainSettings.model_validate(changes)
    found = why_plain_step(settings, shape, device=device, precision=precision, capability=9.0)
    assert found is None if why is None else why in found
