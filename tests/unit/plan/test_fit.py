"""`plan.fit`: what is promised of every answer and of the files that it writes."""

import json
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.rollouts import sampling_sizes
from graftwork.model.shape import cache_bytes
from graftwork.plan.catalog.hardware import find_cpu, find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.fit import candidates
from graftwork.plan.fit.answer import (
    ACCELERATE,
    DEEPSPEED,
    GRAFT,
    accelerate_config,
    deepspeed_config,
    fit,
    settings_files,
)
from graftwork.plan.fit.question import gpu_room, make_question, rollout_load
from graftwork.plan.fit.search import takes_own_step
from graftwork.records.base import Figure
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions
from graftwork.train.settings import TrainSettings

LARGE, SMALL, TINY = "deepseek-coder-6.7b", "deepseek-coder-1.3b", "llama-3.2-1b"


def machine(gpu="RTX 5060 Ti 16GB", gpus=1, ram=128.0, **more):
    return Machine(gpu=find_gpu(gpu), gpus=gpus, ram_gib=ram, cpu=find_cpu("9950X"), **more)


def question(model=LARGE, *, gpu="RTX 5060 Ti 16GB", gpus=1, ram=128.0, **more):
    return make_question(find_model(model), FitOptions(**more), machine=machine(gpu, gpus, ram))


def test_the_example_of_the_manual_fits_and_every_figure_has_a_range():
    answer = fit(question(gpus=2, method="qlora", seq=2048, offload="auto"))
    body = answer.model_dump(mode="json")
    assert body["fits"] is True
    assert body["certainty"] == "computed"
    for key in ("peak_allocated_gib", "peak_reserved_gib", "host_gib", "tokens_per_second", "run_minutes"):
        assert body[key]["low"] < body[key]["value"] < body[key]["high"], key
    assert body["peak_reserved_gib"]["high"] <= body["gpu_gib"]["value"] < 15.57
    assert body["strategy"]["weights"] == "4 bits (NF4)"


def test_a_card_has_less_than_its_name_says():
    room = gpu_room(question(gpus=2), gpus=2)
    assert 13.5 < room.low < room.value < room.high < 15.57
    limited = question(memory_limit_gib=9.0)
    assert gpu_room(limited, gpus=1) == Figure.exact(9.0, "GiB")


@pytest.mark.parametrize("engine", ["graft", "hf"])
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_parts_add_up_to_the_peak(engine, method):
    answer = fit(question(SMALL, method=method, engine=engine, seq=1024, gpus=2, gpu="RTX 4090"))
    parts = {name: figure.value for name, figure in answer.parts_gib.items()}
    beyond = parts.pop("allocator")
    assert sum(parts.values()) == pytest.approx(answer.peak_allocated_gib.value, rel=0.01)
    assert answer.peak_allocated_gib.value + beyond == pytest.approx(answer.peak_reserved_gib.value, rel=0.01)


@settings(max_examples=5, deadline=None)
@given(
    short=st.integers(2, 60),
    more=st.integers(1, 60),
    method=st.sampled_from(["lora", "qlora", "full"]),
    engine=st.sampled_from(["graft", "hf"]),
)
def test_a_setting_that_fits_long_rows_fits_shorter_ones(short, more, method, engine):
    asked = {"method": method, "engine": engine, "gpus": 2, "memory_limit_gib": 6.0, "offload": "none"}
    if fit(question(TINY, seq=(short + more) * 64, **asked), advise=False).fits:
        assert fit(question(TINY, seq=short * 64, **asked), advise=False).fits


@settings(max_examples=5, deadline=None)
@given(
    less=st.integers(2, 12),
    more=st.integers(1, 8),
    method=st.sampled_from(["lora", "qlora"]),
    engine=st.sampled_from(["graft", "hf"]),
)
def test_more_memory_is_never_slower(less, more, method, engine):
    asked = {"method": method, "engine": engine, "gpu": "A100 80GB"}
    tight = fit(question(TINY, memory_limit_gib=float(less), **asked), advise=False)
    roomy = fit(question(TINY, memory_limit_gib=float(less + more), **asked), advise=False)
    if tight.fits:
        assert roomy.fits
        # The card's own tuning ranks by its own estimate of time: so there may be a little.
        assert roomy.tokens_per_second.value >= 0.97 * tight.tokens_per_second.value


@pytest.mark.parametrize("gpu", ["T4", "V100 16GB", "P100"])
def test_cards_without_bfloat16_work_in_float16(gpu):
    answer = fit(question(SMALL, gpu=gpu, method="lora", seq=512))
    assert answer.strategy.precision == "float16"
    assert answer.strategy.tuning is None
    assert any("no bfloat16" in reason for reason in answer.reasons)


def test_eight_bits_need_ada_and_a_large_model():
    large = fit(question(SMALL, gpu="RTX 4090", method="lora"))
    assert large.strategy.weights == "8 bits"
    assert fit(question("smollm2-135m", gpu="RTX 4090", method="lora")).strategy.weights == "16 bits"
    assert fit(question(SMALL, gpu="A100 80GB", method="lora")).strategy.weights == "16 bits"


@pytest.mark.parametrize("engine", ["graft", "hf"])
def test_four_bit_weights_are_never_cut_up(engine):
    answer = fit(question(SMALL, gpus=2, method="qlora", engine=engine, seq=512))
    assert answer.strategy.sharding in ("none", "ddp")
    assert all(candidate.strategy.sharding in ("none", "ddp") for candidate in answer.considered)


def test_two_cards_share_a_small_model_and_are_faster():
    one = fit(question(SMALL, engine="hf", method="qlora", gpus=1))
    two = fit(question(SMALL, engine="hf", method="qlora", gpus=2))
    assert two.strategy.sharding == "ddp"
    assert 1.5 < two.tokens_per_second.value / one.tokens_per_second.value <= 2.0


def test_full_training_of_7b_on_two_16_gb_cards_needs_the_host_and_is_tight_there():
    answer = fit(question(gpus=2, method="full", engine="hf", seq=2048))
    assert answer.fits
    assert answer.strategy.sharding in ("zero3", "fsdp2")
    assert answer.strategy.offload != "none"
    assert 100 < answer.host_gib.low < answer.host_gib.high < 128
    assert "tight" in answer.verdict
    assert not fit(question(gpus=2, method="full", engine="hf", ram=96.0)).fits
    assert not fit(question(gpus=2, method="full", engine="hf", offload="none")).fits


def test_a_no_says_by_how_much_and_what_would_make_it_fit():
    answer = fit(question(gpu="RTX 5070", method="lora", engine="hf", seq=2048, offload="none"))
    assert not answer.fits
    assert "does not fit" in answer.verdict
    assert "GiB are lacking" in answer.verdict
    lacking = answer.peak_reserved_gib.high - answer.gpu_gib.value
    assert f"{lacking:.1f} GiB" in answer.verdict
    says = [remedy.name for remedy in answer.remedies]
    assert any("qlora instead of lora" in name for name in says)
    assert any("GPUs instead of 1" in name or "offload auto" in name for name in says)
    assert all(remedy.fits and remedy.tokens_per_second.value > 0 for remedy in answer.remedies)


def test_the_length_that_is_offered_fits_and_half_as_much_again_does_not():
    asked = {"method": "qlora", "engine": "hf", "batch_size": 1}
    answer = fit(question(seq=32768, **asked))
    assert not answer.fits
    offered = next(remedy for remedy in answer.remedies if remedy.name.startswith("rows of at most"))
    most = offered.strategy.micro_tokens
    assert fit(question(seq=most, **asked), advise=False).fits
    assert not fit(question(seq=round(1.5 * most), **asked), advise=False).fits


def test_a_processor_alone_is_answered_too():
    alone = Machine(cpu=find_cpu("9950X"), ram_gib=32.0)
    answer = fit(
        make_question(
            find_model("smollm2-135m"), FitOptions(method="lora", seq=256, batch_size=8), machine=alone
        )
    )
    assert answer.fits
    assert answer.strategy.sharding == "none"
    big = make_question(find_model(LARGE), FitOptions(method="full", seq=2048), machine=alone)
    assert not fit(big).fits


def test_grpo_generates_and_says_why_not_ppo():
    answer = fit(question(SMALL, method="qlora", algorithm="grpo"))
    assert answer.fits
    assert answer.strategy.engine == "graft"
    assert answer.strategy.train["objective"] == "grpo"
    assert answer.strategy.train["rollouts"] == {
        "prompts": 2,
        "num_generations": 8,
        "max_completion_length": 512,
    }
    assert any("prompts in 8 hours" in reason for reason in answer.reasons)
    assert answer.step_parts_seconds["generation"].value > 0
    assert any("value model" in reason for reason in answer.reasons)
    longer = fit(question(SMALL, method="qlora", algorithm="grpo", completion_tokens=1024))
    assert longer.step_seconds.value > answer.step_seconds.value


def test_a_fit_of_grpo_counts_the_answers_that_are_sampled_between_steps():
    fewer, more = (
        fit(question(SMALL, method="lora", algorithm="grpo", batch_size=rows)) for rows in (16, 64)
    )
    assert more.parts_gib["key-value cache"].value >= fewer.parts_gib["key-value cache"].value > 1.0
    supervised = fit(question(SMALL, method="lora", seq=1024, trained_share=0.5))
    assert fewer.step_seconds.value > supervised.step_seconds.value


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_fit_of_grpo_counts_the_cache_as_the_generator_pads_it(method):
    asked = question(
        SMALL, method=method, algorithm="grpo", batch_size=24, prompt_tokens=300, completion_tokens=128
    )
    load = rollout_load(asked)
    sizes = sampling_sizes(load, recorded=True)
    assert (load.rows_at_once, sizes.slots) == (24, 32)
    expected = cache_bytes(asked.shape, tokens=sizes.columns, rows=sizes.slots, width=2.0)
    answer = fit(asked)
    assert answer.parts_gib["key-value cache"].value == pytest.approx(expected / 2**30)
    parts = sum(figure.value for name, figure in answer.parts_gib.items() if name != "allocator")
    assert parts == pytest.approx(answer.peak_allocated_gib.value, rel=0.01)


def test_a_fit_of_dpo_counts_both_replies_and_the_comparing_pass():
    pairs, rows = (fit(question(SMALL, method="lora", algorithm=name)) for name in ("dpo", "sft"))
    assert pairs.strategy.engine == "graft"
    assert pairs.steps.value == pytest.approx(2 * rows.steps.value, abs=1)
    assert pairs.step_parts_seconds["comparing"].value > 0


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_fit_of_grpo_counts_the_answers_that_the_start_reads_too(method):
    parts = fit(question(SMALL, method=method, algorithm="grpo")).step_parts_seconds
    other = ("generation", "reading prompts", "handling answers", "reference")
    training = sum(figure.value for name, figure in parts.items() if name not in other)
    # One answer of eight; graft's own step reads it once more to measure the divergence.
    passes = 2 if method == "lora" else 1
    assert parts["reference"].value == pytest.approx(passes * training / 3 / 8, rel=0.01)


@pytest.mark.parametrize("change", [{"rope_scaling": {"type": "longrope"}}, {"partial_rotary_factor": 0.75}])
def test_a_fit_takes_the_plain_step_where_training_does(tmp_path, change):
    config = {"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "vocab_size": 32064}
    config |= {"num_attention_heads": 32, "intermediate_size": 8192, "max_position_embeddings": 131072}
    asked = {}
    for name, stated in (("known", config), ("other", config | change)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(stated))
        asked[name] = question(str(tmp_path / name), method="qlora")
    assert takes_own_step(asked["known"])
    assert not takes_own_step(asked["other"])
    assert any("rotary" in reason for reason in fit(asked["other"], advise=False).reasons)


def test_grpo_on_a_processor_samples_before_it_trains():
    asked = question(SMALL, method="lora", algorithm="grpo", completion_tokens=32)
    answer = fit(asked.model_copy(update={"machine": Machine(gpu=None, gpus=0, ram_gib=128.0)}))
    assert answer.step_parts_seconds["generation"].value > 0
    assert answer.strategy.engine == "graft"


@pytest.mark.parametrize(("model", "gpus"), [(LARGE, 1), (LARGE, 2), (SMALL, 1)])
def test_of_the_ways_that_fit_the_fastest_is_taken(model, gpus):
    answer = fit(question(model, gpus=gpus, method="qlora", algorithm="grpo", rows=100))
    assert answer.considered or gpus == 1
    others = [candidate.tokens_per_second.value for candidate in answer.considered if candidate.fits]
    assert answer.tokens_per_second.value >= 0.995 * max(others, default=0.0)


def test_a_remedy_changes_one_thing():
    asked = question(SMALL, gpu="RTX 3060 12GB", method="full", engine="hf", offload="none")
    answer = fit(asked)
    assert not answer.fits
    changed = [remedy for remedy in answer.remedies if "offload" not in remedy.name]
    assert any("GPUs instead of 1" in remedy.name for remedy in changed)
    assert {remedy.strategy.offload for remedy in changed} == {"none"}


def test_cards_that_a_run_leaves_idle_are_for_a_second_run():
    answer = fit(question(gpus=2, method="lora"))
    assert answer.strategy.sharding == "none"
    assert any("use each GPU for a separate run" in reason for reason in answer.reasons)


def test_a_slower_link_is_not_faster():
    asked = {"method": "full", "engine": "hf", "seq": 1024}
    model = find_model(SMALL)
    slow = fit(make_question(model, FitOptions(**asked), machine=machine(gpus=2, link_gb_s=4.0)))
    fast = fit(make_question(model, FitOptions(**asked), machine=machine(gpus=2, link_gb_s=40.0)))
    assert slow.fits
    assert fast.fits
    assert fast.tokens_per_second.value > slow.tokens_per_second.value


@pytest.mark.parametrize("stated", [{"seq": 0}, {"batch_size": 0}, {"rank": -1}, {"epochs": 0.0}])
def test_numbers_that_no_run_can_have_are_refused_by_name(stated):
    with pytest.raises(UserError, match="--"):
        question(**stated)


def test_an_answer_loads_neither_torch_nor_numpy():
    script = (
        "from graftwork.plan.catalog.hardware import find_gpu\n"
        "from graftwork.plan.catalog.models import find_model\n"
        "from graftwork.plan.fit.question import make_question\n"
        "from graftwork.plan.fit.answer import fit\n"
        "from graftwork.records.plan import FitOptions\n"
        "from graftwork.records.hardware import Machine\n"
        "m = Machine(gpu=find_gpu('T4'), gpus=2, ram_gib=64)\n"
        "fit(make_question(find_model('deepseek-coder-6.7b'), FitOptions(), machine=m))\n"
        "import sys\nprint(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "numpy", "peft", "rich"}


def test_a_few_long_rows_decide_on_memory_and_the_mean_on_time():
    mixed = [200] * 950 + [4000] * 50
    asked = {"method": "qlora", "engine": "hf", "batch_size": 4}
    short = fit(question(TINY, seq=[200] * 1000, **asked), advise=False)
    long = fit(question(TINY, seq=mixed, **asked), advise=False)
    assert long.question.rows == 1000
    assert long.strategy.micro_tokens >= 4000
    assert long.peak_reserved_gib.value > short.peak_reserved_gib.value
    # Most batches are short: a step is nowhere near as long as one of long rows only.
    longest = fit(question(TINY, seq=4000, rows=1000, **asked), advise=False)
    assert long.run_minutes.value < 0.6 * longest.run_minutes.value


def test_fit_without_advice_gives_the_same_figures():
    asked = question(TINY, method="full", memory_limit_gib=6.0, offload="none")
    with_advice, without = fit(asked), fit(asked, advise=False)
    assert with_advice.remedies
    assert not without.remedies
    assert with_advice.peak_reserved_gib == without.peak_reserved_gib


def test_two_cards_share_a_7b_in_four_bits_with_checkpointing_and_the_settings_say_so():
    asked = question("qwen2.5-7b", gpus=2, gpu="RTX 4060 Ti 16GB", method="qlora", seq=2048)
    answer = fit(asked, advise=False)
    assert answer.fits
    assert answer.strategy.sharding == "ddp"
    assert answer.strategy.checkpointed_layers == 28
    assert answer.strategy.train["gradient_checkpointing"] == "on"
    TrainSettings.model_validate(answer.strategy.train)
    assert any("with checkpointing" in reason for reason in answer.reasons)
    without = [
        candidate for candidate in answer.considered if candidate.name == "DDP × 2, graft's plain step"
    ]
    assert not any(candidate.fits for candidate in without)


def test_where_nothing_can_even_be_loaded_the_reasons_say_so():
    answer = fit(
        question("qwen2.5-7b", gpu="RTX 4060 Ti 16GB", method="lora", memory_limit_gib=6.0), advise=False
    )
    assert not answer.fits
    assert any("loading alone takes" in reason for reason in answer.reasons)


def test_a_no_counts_few_ways_to_the_tensor(monkeypatch):
    """Each takes a third of a second: what lies far from the edge is not worth it."""
    counted = []
    real = candidates.peak_of_each

    def count(*given, exact=False, **named):
        counted.extend([1] if exact else [])
        return real(*given, exact=exact, **named)

    monkeypatch.setattr(candidates, "peak_of_each", count)
    answer = fit(question("llama-3.1-8b", gpu="T4", method="lora", seq=2048))
    assert not answer.fits
    assert answer.remedies
    assert len(counted) <= 3


def test_reinforcement_learning_on_two_cards_takes_the_faster_engine():
    asked = {"method": "lora", "algorithm": "grpo", "rows": 100}
    one, two = (fit(question(LARGE, gpus=gpus, **asked)) for gpus in (1, 2))
    assert two.strategy == one.strategy
    assert two.run_minutes == one.run_minutes
    assert two.considered[0].name == "TRL on 2 GPUs"
    assert two.tokens_per_second.value > two.considered[0].tokens_per_second.value
    assert any("the other GPU stays idle" in reason and "endpoint" in reason for reason in two.reasons)
    assert any("as fast as TRL on 2 GPUs" in reason for reason in two.reasons)


def test_where_all_cards_are_faster_than_one_that_is_the_answer():
    asked = {"method": "lora", "algorithm": "dpo", "rows": 100, "gpu": "A100 80GB"}
    alone, shared = fit(question(SMALL, **asked)), fit(question(SMALL, gpus=8, **asked))
    assert shared.question.machine.gpus == 8
    assert shared.run_minutes.value < alone.run_minutes.value
    assert shared.considered[0].name == "graft train on one GPU"
    assert shared.considered[0].tokens_per_second == alone.tokens_per_second
    assert any("derived" in reason for reason in shared.reasons)


def test_an_engine_that_was_asked_for_is_not_replaced():
    answer = fit(question(LARGE, gpus=2, method="lora", algorithm="grpo", engine="hf"))
    assert answer.strategy.engine == "hf"
    assert not any("graft train" in option.name for option in answer.considered)


def test_seconds_of_a_reward_are_in_the_step_and_graded_by_all_cores():
    asked = {"method": "lora", "algorithm": "grpo", "rows": 100}
    free, dear = (fit(question(SMALL, **asked, reward_seconds=seconds)) for seconds in (0.0, 8.0))
    rewards = dear.step_parts_seconds["rewards"].value
    assert rewards == pytest.approx(16 * 8.0 / find_cpu("9950X").cores)
    assert dear.step_seconds.value == pytest.approx(free.step_seconds.value + rewards)
    assert any("for rewards" in reason for reason in dear.reasons)
    assert any("rewards not counted" in reason for reason in free.reasons)
    theirs = fit(question(SMALL, **asked, engine="hf", reward_seconds=8.0))
    assert theirs.step_parts_seconds["rewards"].value == pytest.approx(16 * 8.0)


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
    assert all(chosen.method == method for chosen in taken)
    for chosen in taken:
        assert (chosen.processes > 1) == (chosen.strategy != "single")
        assert not (method == "qlora" and chosen.strategy in ("fsdp", "zero3"))
        assert not (gpu == "T4" and chosen.strategy in ("zero2", "zero3"))


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
    ("sharding", "kind"), [("none", "NO"), ("ddp", "MULTI_GPU"), ("zero3", "DEEPSPEED"), ("fsdp2", "FSDP")]
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
