"""What the teams' own configurations hold that looks right and is not: one test for each finding."""

from functools import cache
from pathlib import Path

import pytest

from graftwork.plan.lint.project import Linted, LintOptions, lint_file

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


def test_two_cards_are_reported_not_to_be_one_of_twice_the_size():
    assert (
        "2 GPUs are not one of 2 times the size" in finding("seed2_two_cards.json", "full-does-not-fit").why
    )


def test_fourteen_gb_is_recognised_as_the_size_in_16_bits():
    assert "what they are in 16 bits" in finding("seed5_lora_cpu.yaml", "weights-larger-than-stated").why


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
