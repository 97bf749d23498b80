"""`graft plan lint`: exit codes, one JSON document, and graft.yaml through the resolved project."""

import json
import sys

import pytest

from graftwork.cli.main import main

GOOD = "training:\n  max_steps: 1000\n  save_steps: 100\n  warmup_steps: 50\n"


@pytest.fixture
def graft(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return ended.value.code or 0, output.out

    return run


def test_a_good_configuration_is_exit_0_and_an_error_exit_1(graft, tmp_path):
    file = tmp_path / "training.yaml"
    file.write_text(GOOD)
    assert graft("plan", "lint", file)[0] == 0
    file.write_text(GOOD.replace("1000", "40"))
    code, out = graft("plan", "lint", file, "--json")
    assert code == 1
    found = json.loads(out)["findings"]
    assert {item["rule"] for item in found} == {"warmup-outlasts-run", "checkpoint-never-comes"}
    assert found[0]["where"].endswith("training.yaml:3")


def test_warnings_alone_are_exit_0(graft, tmp_path):
    file = tmp_path / "training.yaml"
    file.write_text(GOOD + "  packing: true\n")
    code, out = graft("plan", "lint", file, "--json")
    assert code == 0
    assert [finding["severity"] for finding in json.loads(out)["findings"]] == ["warning"]


def test_the_command_line_supplies_values_missing_in_the_file(graft, tmp_path):
    file = tmp_path / "training.yaml"
    file.write_text("bf16: true\nnum_train_epochs: 1\nper_device_train_batch_size: 8\nsave_steps: 50\n")
    assert graft("plan", "lint", file)[0] == 0
    code, out = graft("plan", "lint", file, "--rows", 100, "--gpu", "V100", "--json")
    assert code == 1
    assert {"bf16-missing", "checkpoint-never-comes"} <= {
        finding["rule"] for finding in json.loads(out)["findings"]
    }


def test_lengths_come_from_a_file_of_numbers_or_of_rows(graft, tmp_path):
    file, lengths = tmp_path / "c.yaml", tmp_path / "lengths.jsonl"
    file.write_text("max_seq_length: 100\nlearning_rate: 0.0002\n")
    for text in ("90\n300\n", '{"length": 90}\n{"tokens": 300}\n', "[90, 300]"):
        lengths.write_text(text)
        _, out = graft("plan", "lint", file, "--lengths", lengths, "--json")
        (found,) = json.loads(out)["findings"]
        assert found["rule"] == "rows-are-cut"
        assert "50.0%" in found["what"]


def test_unchecked_rules_are_reported_with_the_option_that_enables_them(graft, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("learning_rate: 0.0002\nmodel_name: nobody/knows-this\n")
    _, out = graft("plan", "lint", file, "--json")
    unknown = " ".join(json.loads(out)["unknown"])
    assert all(option in unknown for option in ("--rows", "--model", "--gpu", "--lengths"))
    assert "nobody/knows-this" in unknown


def test_an_unknown_card_and_a_missing_file_are_the_users_mistakes(graft, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    code, out = graft("plan", "lint", file, "--gpu", "Voodoo 2", "--json")
    assert code == 2
    assert json.loads(out)["fix"]
    assert graft("plan", "lint", tmp_path / "none.yaml", "--json")[0] == 2


def test_graft_yaml_is_checked_with_its_defaults_resolved(graft, tmp_path):
    (tmp_path / "graft.yaml").write_text(
        "project: p\ndata:\n  logs: [log.jsonl]\ntrain:\n  method: full\n  learning_rate: 3.0e-3\n"
        "  checkpoint_every: 20\n"
        "gate:\n  rules:\n    - {metric: json_valid, over: 0.95}\n"
    )
    code, out = graft("plan", "lint", tmp_path / "graft.yaml", "--rows", 40, "--json")
    answer = json.loads(out)
    found = {finding["rule"]: finding for finding in answer["findings"]}
    assert answer["kind"] == "graft"
    assert code == 1, "40 rows by 8, twice, are 10 steps"
    assert "10" in found["checkpoint-never-comes"]["what"]
    assert found["checkpoint-never-comes"]["where"].endswith("graft.yaml:7")
    assert found["rate-out-of-range"]["where"].endswith("graft.yaml:6")


def test_a_mistake_in_graft_yaml_is_reported_as_everywhere(graft, tmp_path):
    (tmp_path / "graft.yaml").write_text("project: p\ndata:\n  logs: [a]\ntrain:\n  ranc: 8\n")
    code, out = graft("plan", "lint", tmp_path / "graft.yaml", "--json")
    assert code == 2
    assert "rank" in json.loads(out)["fix"]


def test_text_of_a_file_is_not_obeyed_by_the_terminal(graft, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text('learning_rate: 0.0002\nsave_steps: 5\nname: "YOUR_[red]\\e[31m"\n')
    code, out = graft("plan", "lint", file)
    assert code == 1
    assert "\x1b[31m" not in out
    assert "[red]" in out


def test_every_model_of_a_project_is_checked_and_what_they_share_is_reported_once(graft, tmp_path):
    (tmp_path / "graft.yaml").write_text(
        "project: p\ndata:\n  logs: [log.jsonl]\ntrain:\n  alpha: 1000\n"
        "models:\n  main: {}\n  cook:\n    train:\n      learning_rate: 0.9\n"
    )
    _, out = graft("plan", "lint", tmp_path / "graft.yaml", "--json")
    found = json.loads(out)["findings"]
    assert [item["rule"] for item in found] == ["scale-is-odd", "rate-out-of-range"]
    assert found[1]["where"].endswith("graft.yaml:10")


def test_a_card_of_ones_own_catalog_is_known(graft, tmp_path):
    header = "name,memory_gib,capability,half_tflops,bandwidth_gb_s,pcie_gb_s,watts,source,dated\n"
    (tmp_path / "gpus.csv").write_text(header + "Our card,20,8.6,70,600,25,200,ours,2026-11-15\n")
    file = tmp_path / "training.yaml"
    file.write_text(GOOD)
    code, out = graft("plan", "lint", file, "--gpu", "Our card", "--catalog", tmp_path, "--json")
    assert code == 0
    assert json.loads(out)["gpu"] == "Our card"


@pytest.mark.parametrize("written", ["0", "12\n0\n", '{"tokens": []}\n'])
def test_rows_of_no_tokens_are_a_mistake(graft, tmp_path, written):
    (tmp_path / "training.yaml").write_text(GOOD)
    given = written
    if not written.isdigit():
        (tmp_path / "lengths").write_text(written)
        given = tmp_path / "lengths"
    assert graft("plan", "lint", tmp_path / "training.yaml", "--lengths", given)[0] == 2
