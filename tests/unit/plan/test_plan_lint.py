"""Lint: how configurations are read, where each rule speaks, and what it finds in those of the teams."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.lint.configuration import (
    ConfigLocation,
    Configuration,
    LintContext,
    Peaks,
    count_steps,
    detect,
    effective_batch,
    read_foreign,
    read_written,
)
from graftwork.plan.lint.project import RULES, Linted, LintOptions, lint, lint_file
from graftwork.plan.lint.rules_learning import same_model
from graftwork.records.errors import UserError
from graftwork.records.plan import ModelShape

SEVEN = ModelShape(
    name="seven", hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128, intermediate_size=11008,
    vocab_size=32256, tied_embeddings=False, max_positions=4096,
)  # fmt: skip
UNKNOWN = LintContext()
BIG = LintContext(shape=SEVEN, parameters=6_740_000_000)


def say(**values) -> Configuration:
    return Configuration.model_validate({"file": "c.yaml", "kind": "training", **values})


def rules_of(config: Configuration, context: LintContext | None = None) -> set[str]:
    return {finding.rule for finding in lint(config, context or LintContext())}


def on(name: str, **more) -> LintContext:
    return LintContext(gpu=find_gpu(name), **more)


def peaks(as_set: float, recomputed: float) -> Peaks:
    return Peaks(as_set=as_set, recomputed=recomputed, tokens=4096)


SPEAKS = [
    ("warmup-large-share", say(max_steps=100, warmup_steps=30), UNKNOWN),
    ("warmup-outlasts-run", say(rows=160, epochs=1, micro_batch=16, warmup_steps=10), UNKNOWN),
    ("both-halves", say(both_halves=True), UNKNOWN),
    ("batch-larger-than-data", say(rows=10, micro_batch=4, accumulation=4), UNKNOWN),
    ("max-steps-win", say(max_steps=100, epochs=3), UNKNOWN),
    ("saving-is-off", say(save_when="no"), UNKNOWN),
    ("evaluation-never-happens", say(max_steps=100, eval_when="steps", eval_steps=500), UNKNOWN),
    ("evaluation-not-switched-on", say(eval_steps=50), UNKNOWN),
    ("stop-without-metric", say(stops_early=True, eval_when="steps", eval_steps=10), UNKNOWN),
    ("best-without-evaluation", say(keep_best=True), UNKNOWN),
    ("best-off-the-grid", say(keep_best=True, save_when="epoch", eval_when="steps", eval_steps=5), UNKNOWN),
    ("batch-does-not-divide", say(kind="graft", batch=7, gpus=2), UNKNOWN),
    ("batch-contradicts-itself", say(kind="deepspeed", batch=10, micro_batch=4, accumulation=2), UNKNOWN),
    ("weights-do-not-fit", say(method="lora", precision="float32"), on("RTX 4090", parameters=7_000_000_000)),
    ("weights-do-not-fit", say(method="lora", weights_dtype="float32", ram_gib=16),
     LintContext(on_cpu=True, parameters=7_000_000_000)),
    ("recomputing-is-off", say(max_length=4096), on("RTX 4090", peaks=peaks(40, 9))),
    ("peak-does-not-fit", say(max_length=4096), on("RTX 4090", peaks=peaks(80, 30))),
    ("fp16-products", say(bits=4, compute_dtype="float16"), on("RTX 4090")),
    ("two-half-precisions", say(bits=4, compute_dtype="float16", precision="bfloat16"), UNKNOWN),
    ("float32-products", say(bits=4), UNKNOWN),
    ("8bit-optimizer-on-cpu", say(optimizer="paged_adamw_8bit"), LintContext(on_cpu=True)),
    ("fp16-on-cpu", say(precision="float16"), LintContext(on_cpu=True)),
    ("rate-out-of-range", say(method="full", learning_rate=2e-4), BIG),
    ("rate-out-of-range", say(method="lora", learning_rate=1e-5), BIG),
    ("scale-is-odd", say(method="lora", rank=64, alpha=1024), BIG),
    ("rows-are-cut", say(max_length=100), LintContext(lengths=(50, 60, 150))),
    ("length-beyond-model", say(max_length=8192), BIG),
    ("another-is-deployed", say(model="a/one-7b", deployed_model="a/one-7b-instruct"), UNKNOWN),
    ("spot-without-checkpoints", say(spot=True, save_steps=500, max_steps=100), UNKNOWN),
    ("deadline-comes-first", say(deadline_minutes=240, expected_minutes=700), UNKNOWN),
    ("number-as-text", say(texts_for_numbers={"lr": "2e-4"}), UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "config", "context"), SPEAKS, ids=[row[0] for row in SPEAKS])
def test_a_rule_speaks_where_it_should(rule, config, context):
    assert rule in rules_of(config, context)


SILENT = [
    ("max-steps-win", say(max_steps=10, rows=40, micro_batch=4, epochs=1), UNKNOWN),
    ("batch-larger-than-data", say(rows=16, micro_batch=4, accumulation=4), UNKNOWN),
    ("warmup-large-share", say(max_steps=1000, warmup_steps=50), UNKNOWN),
    ("warmup-outlasts-run", say(warmup_steps=50), UNKNOWN),
    ("checkpoint-never-comes", say(max_steps=100, save_when="epoch", save_steps=500), UNKNOWN),
    ("best-off-the-grid", say(keep_best=True, save_steps=100, eval_when="steps", eval_steps=50), UNKNOWN),
    ("stop-without-metric", say(stops_early=True, eval_when="epoch", best_metric="eval_loss"), UNKNOWN),
    ("batch-contradicts-itself", say(kind="deepspeed", batch=32, micro_batch=4, accumulation=2), UNKNOWN),
    ("weights-do-not-fit", say(method="qlora", bits=4), on("RTX 4090", parameters=7_000_000_000)),
    ("full-does-not-fit",
     say(method="full", precision="bfloat16", zero_stage=3, offload_optimizer=True, offload_weights=True),
     on("RTX 5060 Ti", parameters=6_740_000_000)),
    ("fp16-products", say(bits=4, compute_dtype="float16"), on("T4")),
    ("packing-mixes-rows", say(packing=True, document_masks=True), UNKNOWN),
    ("rate-out-of-range", say(method="lora", learning_rate=2e-4), BIG),
    ("scale-is-odd", say(method="lora", rank=64, alpha=16), BIG),
    ("scale-is-odd", say(method="lora", rank=256, alpha=16, use_rslora=True), BIG),
    ("rows-are-cut", say(max_length=200), LintContext(lengths=(50, 60, 150))),
    ("spot-without-mirror", say(spot=True, mirror="s3://bucket"), UNKNOWN),
    ("rate-cannot-be-proven", say(target_rate=0.95, test_rows=126), UNKNOWN),
    ("another-is-deployed", say(model="Qwen/Qwen3_8B", deployed_model="qwen3-8b"), UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "config", "context"), SILENT, ids=[row[0] for row in SILENT])
def test_a_rule_is_silent_where_all_is_well(rule, config, context):
    assert rule not in rules_of(config, context)


def test_nothing_said_is_nothing_found():
    assert lint(say(), UNKNOWN) == ()


def test_every_rule_has_its_own_name():
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_a_finding_points_at_the_key_and_not_only_at_the_file():
    config = say(
        save_when="no", places={"save_when": ConfigLocation(key="checkpointing.save_strategy", line=7)}
    )
    (found,) = lint(config, UNKNOWN)
    assert (found.where, found.key) == ("c.yaml:7", "checkpointing.save_strategy")


def test_a_value_from_the_command_line_is_shown_as_its_option():
    config = say(precision="bfloat16", places={"gpu": ConfigLocation(key="--gpu")})
    assert (
        next(finding for finding in lint(config, on("T4")) if finding.rule == "bf16-missing").where == "--gpu"
    )


def test_rows_lost_are_reported_as_shares_of_rows_and_tokens():
    found = next(
        finding for finding in lint(say(max_length=100), LintContext(lengths=(100, 100, 100, 200))) if finding
    )
    assert found.what.startswith("25.0% of the rows")
    assert found.why.startswith("20.0% of all tokens")


def test_a_base_and_its_instruct_version_are_two_models():
    assert not same_model("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct")


@given(
    rows=st.integers(1, 5000), micro=st.integers(1, 16), times=st.integers(1, 32), cards=st.integers(1, 8),
    epochs=st.integers(1, 5),
)  # fmt: skip
def test_steps_cover_all_rows_and_no_more_than_one_smaller_batch(rows, micro, times, cards, epochs):
    config = say(rows=rows, micro_batch=micro, accumulation=times, gpus=cards, epochs=epochs)
    steps, batch = count_steps(config), effective_batch(config)
    assert steps is not None
    assert steps.epoch is not None
    assert steps.epoch * batch >= rows
    assert (steps.epoch - 1) * batch < rows
    assert steps.total == steps.epoch * epochs


@given(steps=st.integers(2, 2000), warmup=st.integers(0, 3000))
def test_a_warm_up_is_called_too_long_by_exactly_one_rule_or_none(steps, warmup):
    found = rules_of(say(max_steps=steps, warmup_steps=warmup)) & {
        "warmup-outlasts-run",
        "warmup-large-share",
    }
    expected = warmup > 0.2 * steps
    assert len(found) == expected
    if warmup >= steps:
        assert found == {"warmup-outlasts-run"}


@given(cards=st.integers(1, 8), stage=st.sampled_from([None, 1, 2, 3]))
def test_more_cards_or_a_higher_stage_never_need_more_of_a_card(cards, stage):
    from graftwork.plan.lint.rules_device import full_floor

    def floor(cards, stage):
        config = say(method="full", precision="bfloat16", gpus=cards, zero_stage=stage or 1)
        found = full_floor(config, BIG)
        assert found is not None
        return found[0]

    assert floor(cards + 1, stage) <= floor(cards, stage)
    if stage and stage < 3:
        assert floor(cards, stage + 1) <= floor(cards, stage)


def find(**fields):
    config = Configuration(file="f.yaml", kind="training", **fields)
    return {rule.id for rule in RULES if rule.id.startswith("rl-") for _ in rule.check(config, LintContext())}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"algorithm": "grpo", "method": "lora", "learning_rate": 1e-6}, {"rl-rate-too-low"}),
        ({"algorithm": "grpo", "method": "full", "learning_rate": 1e-6}, set()),
        ({"algorithm": "sft", "method": "lora", "learning_rate": 1e-6}, set()),
        ({"algorithm": "GRPO", "answers": 2}, {"rl-few-answers"}),
        ({"algorithm": "grpo", "answers": 4, "reward_scale": "group"}, {"rl-deviation-of-few"}),
        ({"algorithm": "grpo", "answers": 8, "reward_scale": "group"}, set()),
        ({"algorithm": "grpo", "method": "lora", "learning_rate": 1e-4, "answers": 8}, set()),
    ],
)
def test_mistakes_of_reinforcement_learning_are_found(fields, expected):
    assert find(**fields) == expected


AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
adapter: qlora
load_in_4bit: true
sequence_len: 2048
sample_packing: true
lora_r: 32
lora_alpha: 16
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
bf16: auto
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
packing: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
eval_steps: 500
"""


def read(text, file="c.yaml"):
    return read_foreign(read_written(text, file=file))


def test_axolotl_is_read_by_its_own_names():
    output = read(AXOLOTL)
    assert (output.kind, output.method, output.micro_batch, output.max_length) == (
        "axolotl",
        "qlora",
        2,
        2048,
    )
    assert (output.save_when, output.eval_when, output.warmup_ratio) == ("epoch", "epoch", 0.1)
    assert output.document_masks
    assert output.places["rank"].line == 6


def test_axolotl_without_an_adapter_trains_everything():
    assert read(AXOLOTL.replace("adapter: qlora\n", "").replace("load_in_4bit: true\n", "").replace(
        "lora_r: 32\nlora_alpha: 16\n", "")).method == "full"  # fmt: skip


def test_llama_factory_packs_without_masks_unless_neat():
    assert read(LLAMA_FACTORY).document_masks is None
    assert read(LLAMA_FACTORY + "neat_packing: true\n").document_masks
    assert read(LLAMA_FACTORY).kind == "llama-factory"


def test_deepspeed_is_read_and_auto_is_not_guessed():
    output = read(
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,'
        ' "bf16": {"enabled": true}, "fp16": {"enabled": false},'
        ' "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},'
        ' "offload_optimizer": {"device": "none"}},'
        ' "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}',
        file="ds.json",
    )
    assert (output.kind, output.batch, output.micro_batch, output.learning_rate) == (
        "deepspeed",
        None,
        2,
        None,
    )
    assert (output.precision, output.zero_stage) == ("bfloat16", 3)
    assert output.offload_weights
    assert not output.offload_optimizer


def test_keys_are_found_at_any_depth_and_the_shallowest_wins():
    output = read(
        "training:\n  optimizer:\n    learning_rate: 1.0e-5\n  learning_rate: 2.0e-4\n  save_steps: 5\n"
    )
    assert output.learning_rate == 2e-4
    assert output.places["learning_rate"].key == "training.learning_rate"
    assert output.places["save_steps"].line == 5


def test_a_number_that_yaml_reads_as_a_text_is_still_a_number_here():
    output = read("learning_rate: 2e-4\nsave_steps: 10\n")
    assert output.learning_rate == 2e-4
    assert output.texts_for_numbers == {"learning_rate": "2e-4"}
    assert not read('{"learning_rate": 2e-4, "save_steps": 10}', file="c.json").texts_for_numbers


@pytest.mark.parametrize("word", ["no", '"no"'])
def test_no_is_a_strategy_with_and_without_quotes(word):
    assert read(f"save_strategy: {word}\nsave_steps: 10\n").save_when == "no"


def test_intervals_below_one_are_shares_of_the_run_and_never_too_long():
    output = read("save_steps: 0.1\nmax_steps: 5\nlearning_rate: 0.1\n")
    assert output.save_steps is None


def test_a_warm_up_below_one_is_a_share():
    assert read("warmup_steps: 0.05\nmax_steps: 500\n").warmup_ratio == 0.05


def test_fp16_off_says_nothing_about_the_precision():
    assert read("fp16: false\nlearning_rate: 0.1\nmax_steps: 1\n").precision is None


@pytest.mark.parametrize(
    ("text", "file", "line"),
    [("a: [1\nb: 2\n", "c.yaml", "2"), ('{"a": 1,\n "b": }', "c.json", "2"), ("- a\n", "c.yaml", "")],
)
def test_a_file_that_cannot_be_read_is_a_mistake_with_its_line(text, file, line):
    with pytest.raises(UserError) as mistake:
        read(text, file=file)
    assert mistake.value.where.startswith(f"{file}:{line}" if line else file)


def test_a_file_that_is_no_training_configuration_is_refused():
    with pytest.raises(UserError):
        read("services:\n  web:\n    image: nginx\n")


def test_json_with_tabs_loses_only_its_lines():
    output = read('{\t"save_steps": 10,\n\t"max_steps": 5}', file="c.json")
    assert output.save_steps == 10


def test_a_graft_yaml_is_distinguished_from_other_configurations():
    assert detect(read_written("project: p\ndata:\n  logs: [a]\n", file="graft.yaml")) == "graft"


def test_both_halves_at_once_are_noticed_in_either_kind_of_file():
    assert read("bf16: true\nfp16: true\nmax_steps: 5\n").both_halves
    both = '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "fp16": {"enabled": true}}'
    assert read(both, file="ds.json").both_halves
    assert not read("bf16: true\nfp16: false\nmax_steps: 5\n").both_halves


FILES = Path(__file__).parents[2] / "data" / "lint"


@cache
def look(name: str, given: LintOptions = LintOptions()) -> Linted:  # noqa: B008
    return lint_file(FILES / name, given)


def finding(name: str, rule: str, given: LintOptions = LintOptions()):  # noqa: B008
    found = {finding.rule: finding for finding in look(name, given).findings}
    assert rule in found, sorted(found)
    return found[rule]


T4 = LintOptions(gpu="T4")


@pytest.mark.parametrize(
    ("name", "rule", "severity", "line", "says"),
    [
        ("seed5_lora_cpu.yaml", "warmup-outlasts-run", "error", 15, ["50", "45"]),
        ("seed5_lora_cpu.yaml", "checkpoint-never-comes", "error", 19, ["50", "45"]),
        ("seed5_lora_cpu.yaml", "stop-without-evaluation", "error", 20, ["early stopping"]),
        ("seed5_lora_cpu.yaml", "epoch-steps-not-as-stated", "error", 25, ["15", "80"]),
        ("seed5_lora_cpu.yaml", "steps-not-as-stated", "error", 26, ["45", "240"]),
        ("seed5_lora_cpu.yaml", "weights-larger-than-stated", "error", 27, ["28.4 GiB", "14 GB"]),
        ("seed5_lora_cpu.yaml", "memory-larger-than-stated", "error", 28, ["20 GB", "28.4 GiB"]),
        ("seed5_lora_cpu.yaml", "trainable-not-as-stated", "warning", 29, ["5.05M", "7.00M"]),
        ("seed5_lora_cpu.yaml", "download-larger-than-stated", "warning", 30, ["15.2 GB"]),
        ("seed5_lora_cpu.yaml", "serving-larger-than-stated", "warning", 31, ["10 GB", "14.2 GiB"]),
        ("seed5_lora_cpu.yaml", "rate-cannot-be-proven", "warning", 32, ["31", "98.0%"]),
        ("seed5_lora_cpu.yaml", "data-from-another-model", "warning", 33, ["30B"]),
        ("seed5_lora_cpu.yaml", "only-attention", "note", 9, ["attention"]),
        ("seed5_lora_cpu.yaml", "few-steps", "note", 11, ["45"]),
        ("seed4_training.yaml", "packing-mixes-rows", "warning", 20, ["apart"]),
        ("seed4_training.yaml", "placeholder", "error", 33, ["YOUR_ORG"]),
        ("seed4_out_of_memory.yaml", "batch-not-as-stated", "error", 8, ["1 × 32 = 32", "16"]),
        ("seed4_spot.yaml", "best-off-the-grid", "error", 25, ["50", "200"]),
        ("seed4_spot.yaml", "spot-without-mirror", "warning", 12, ["own disk"]),
        ("seed4_ten_steps.yaml", "checkpoint-never-comes", "error", 24, ["200", "10"]),
        ("seed4_ten_steps.yaml", "evaluation-never-happens", "error", 27, ["200", "10"]),
        ("seed3_kaggle.yaml", "bf16-missing", "error", 9, ["P100"]),
        ("seed3_kaggle.yaml", "gpu-unsupported", "warning", 4, ["2.8", "P100"]),
        ("seed3_kaggle.yaml", "no-tensor-cores", "note", 9, ["P100"]),
        ("seed3_sagemaker.yaml", "full-does-not-fit", "error", 7, ["50.2 GiB", "15.8"]),
        ("seed3_sagemaker.yaml", "weights-larger-than-stated", "error", 13, ["12.6 GiB", "5 GB"]),
        ("seed3_sagemaker.yaml", "gpu-unsupported", "warning", 5, ["2.11", "V100"]),
        ("seed2_two_cards.json", "full-does-not-fit", "error", 4, ["56.5 GiB a GPU"]),
        ("seed2_two_cards.json", "batch-contradicts-itself", "error", 10, ["16", "32"]),
        ("seed2_two_cards.json", "fp16-where-bf16-is", "note", 11, ["RTX 5060 Ti"]),
        ("seed1_full_16gb.json", "full-hardly-fits", "warning", 14, ["12.6 of 15.6 GiB"]),
        ("seed1_full_16gb.json", "host-memory-short", "warning", 15, ["100 GiB", "151"]),
        ("seed1_full_16gb.json", "ppo-is-heavy", "warning", 5, ["PPO"]),
        ("seed1_full_16gb.json", "fp16-where-bf16-is", "note", 12, ["RTX 5060 Ti"]),
    ],
)
def test_each_finding_is_found_at_its_line_with_its_figures(name, rule, severity, line, says):
    found = finding(name, rule)
    assert found.severity == severity
    assert found.where == f"{FILES / name}:{line}"
    assert all(word in found.what for word in says), found.what
    assert found.why
    assert found.fix


@pytest.mark.parametrize("rule", ["bf16-missing", "flash-attention-missing", "tf32-missing"])
def test_the_fourth_configuration_does_not_run_on_the_t4_that_the_document_offers(rule):
    assert finding("seed4_training.yaml", rule, T4).severity == "error"
    on_a100 = {finding.rule for finding in look("seed4_training.yaml", LintOptions(gpu="A100 40GB")).findings}
    assert rule not in on_a100


def test_the_right_parts_of_the_configurations_are_left_alone():
    rules = {finding.rule for finding in look("seed5_lora_cpu.yaml").findings}
    assert not rules & {"rate-out-of-range", "scale-is-odd", "batch-not-as-stated", "length-beyond-model"}
    assert "batch-not-as-stated" not in {finding.rule for finding in look("seed4_training.yaml").findings}


def test_errors_come_first():
    severities = [finding.severity for finding in look("seed5_lora_cpu.yaml").findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


def test_checkpointing_that_is_off_where_it_is_needed_is_found_by_the_estimated_peak(tmp_path):
    text = (FILES / "seed3_kaggle.yaml").read_text()
    file = tmp_path / "kaggle.yaml"
    file.write_text(text.replace("gradient_checkpointing: true", "gradient_checkpointing: false"))
    assert "recomputing-is-off" in {finding.rule for finding in lint_file(file, LintOptions()).findings}
    assert "recomputing-is-off" not in {finding.rule for finding in look("seed3_kaggle.yaml").findings}
    short = {finding.rule for finding in lint_file(file, LintOptions(lengths="128")).findings}
    assert "recomputing-is-off" not in short, "rows of 128 tokens need none"


def test_a_session_shorter_than_the_estimated_run_is_found():
    many = LintOptions(rows=50_000, lengths="1500", gpu="T4")
    few = LintOptions(rows=20, lengths="200", gpu="T4")
    rules = [{finding.rule for finding in look("seed3_kaggle.yaml", given).findings} for given in (many, few)]
    assert "deadline-comes-first" in rules[0]
    assert "deadline-comes-first" not in rules[1]
