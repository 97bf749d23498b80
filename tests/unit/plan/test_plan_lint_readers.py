"""Files of other tools become one form, with the line of every key; what is not said stays unsaid."""

import pytest

from graftwork.plan.lint.configuration import detect, read_foreign, read_written
from graftwork.records.errors import UserError

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
