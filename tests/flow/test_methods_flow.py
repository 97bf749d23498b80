"""Every method of training goes the whole way: planned, trained, proven, released, served."""

import json
from pathlib import Path

import pytest
from flows import opened

from graftwork.pipeline.steps.release import TryOut
from graftwork.pipeline.table import run_pipeline
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.run import TrainOutcome

pytestmark = pytest.mark.slow

METHODS = {
    "qlora": {"method": "qlora"},
    "rslora": {"use_rslora": True, "modules": {"q_proj": {"rank": 4, "alpha": 2.0}}},
    "dora": {"method": "dora", "upper_layers": 1},
    "full": {"method": "full", "learning_rate": 0.001},
}


def run(folder, listener, upto=None):
    with opened(folder, listener) as work:
        return run_pipeline(work, upto=upto)


@pytest.mark.parametrize("method", ["qlora", "rslora"])
def test_a_method_trains_what_was_planned(small_project, listener, change_settings, method):
    change_settings(small_project, train=METHODS[method])
    made = run(small_project, listener, upto="train")
    plan, outcome = made.get("plan", Plan), made.get("train", TrainOutcome)
    assert plan.method == METHODS[method].get("method", "lora")
    assert outcome.trainable_parameters == plan.trainable_parameters.value
    assert outcome.final_loss < outcome.first_loss
    assert outcome.base_hash_before == outcome.base_hash_after
    assert outcome.base_proof == "memory"
    config = json.loads((Path(outcome.adapter_folder) / "adapter_config.json").read_text())
    assert config["use_rslora"] == (method == "rslora")
    assert config["rank_pattern"] == ({"q_proj": 4} if method == "rslora" else {})


@pytest.mark.parametrize("method", ["dora", "full"])
def test_a_trained_method_is_released_and_answers(small_project, listener, change_settings, method):
    change_settings(small_project, train=METHODS[method])
    made = run(small_project, listener)
    plan, outcome = made.get("plan", Plan), made.get("train", TrainOutcome)
    assert outcome.trainable_parameters == plan.trainable_parameters.value
    assert outcome.final_loss < outcome.first_loss
    assert outcome.base_proof == ("files" if method == "full" else "memory")
    assert outcome.base_hash_before == outcome.base_hash_after
    release = made.get("release", Release)
    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert weights in {file.path for file in release.files}
    assert {attempt.answered_by for attempt in made.get("try", TryOut).tried} == {release.id}
