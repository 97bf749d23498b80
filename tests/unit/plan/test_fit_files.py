"""What `plan.fit` writes is taken by those who read it."""

import json

import pytest
import yaml

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.fit.answer import (
    ACCELERATE,
    DEEPSPEED,
    GRAFT,
    accelerate_config,
    deepspeed_config,
    fit,
    settings_files,
)
from graftwork.plan.fit.question import make_question
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions
from graftwork.train.settings import TrainSettings

MODEL = find_model("llama-3.2-1b")


def answer(gpu="RTX 4090", gpus=2, **more):
    machine = Machine(gpu=find_gpu(gpu), gpus=gpus, ram_gib=128.0)
    return fit(make_question(MODEL, FitOptions(seq=512, **more), machine=machine))


def with_strategy(found, **changes):
    return found.model_copy(update={"strategy": found.strategy.model_copy(update=changes)})


@pytest.mark.parametrize("gpu", ["RTX 4090", "T4"])
@pytest.mark.parametrize("method", ["lora", "qlora", "dora", "full"])
def test_every_strategy_of_graft_is_taken_by_the_trainer(gpu, method):
    found = answer(gpu, method=method)
    strategies = [found.strategy, *(candidate.strategy for candidate in found.considered)]
    taken = [
        TrainSettings.model_validate(strategy.train) for strategy in strategies if strategy.engine == "graft"
    ]
    assert taken
    assert all(settings.method == method for settings in taken)
    for settings in taken:
        assert (settings.processes > 1) == (settings.strategy != "single")
        assert not (method == "qlora" and settings.strategy in ("fsdp", "zero3"))
        assert not (gpu == "T4" and settings.strategy in ("zero2", "zero3"))


def test_the_train_section_reads_back_from_its_file():
    found = answer(method="lora")
    text = settings_files(found)[GRAFT]
    assert text.startswith("# llama-3.2-1b by lora")
    assert TrainSettings.model_validate(yaml.safe_load(text)["train"]).rank == 16


@pytest.mark.parametrize(
    ("sharding", "offload", "stage"),
    [("none", "none", 0), ("ddp", "none", 0), ("zero2", "optimizer", 2), ("zero3", "weights", 3)],
)
def test_deepspeed_takes_its_file(sharding, offload, stage):
    found = with_strategy(answer(engine="hf", method="full"), sharding=sharding, offload=offload)
    config = json.loads(json.dumps(deepspeed_config(found)))
    cards = 1 if sharding == "none" else 2
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * cards
    assert config["train_batch_size"] == product
    assert config["zero_optimization"]["stage"] == stage
    assert ("offload_param" in config["zero_optimization"]) == (offload == "weights")
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    read = zero.get_zero_config(config)
    assert read.stage == stage


@pytest.mark.parametrize(
    ("sharding", "kind"),
    [("none", "NO"), ("ddp", "MULTI_GPU"), ("zero3", "DEEPSPEED"), ("fsdp2", "FSDP")],
)
def test_accelerate_takes_its_file(tmp_path, sharding, kind):
    found = with_strategy(answer(engine="hf", method="lora"), sharding=sharding)
    file = tmp_path / ACCELERATE
    file.write_text(settings_files(found)[ACCELERATE])
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    read = arguments.load_config_from_file(str(file))
    assert read.distributed_type.value == kind if hasattr(read.distributed_type, "value") else kind
    assert read.num_processes == (1 if sharding == "none" else 2)
    assert accelerate_config(found)["distributed_type"] == kind


def test_old_cards_get_float16_in_all_files():
    found = answer("T4", engine="hf", method="lora")
    assert deepspeed_config(found)["fp16"]["enabled"]
    assert not deepspeed_config(found)["bf16"]["enabled"]
    assert accelerate_config(found).get("mixed_precision", "fp16") == "fp16"
    assert set(settings_files(found)) == {DEEPSPEED, ACCELERATE}
