"""`graft plan serve` at the door: exit codes, keys, and no torch."""

import json
import subprocess
import sys

import pytest

from graftwork.cli.main import main
from graftwork.plan.fit import project as fit
from graftwork.records.plan import DeviceFacts

KEYS = {
    "verdict", "good", "fits", "meets_limit", "certainty", "weights", "memory_gib", "available_gib",
    "spare_gib", "parts_gib", "first_token_seconds", "token_seconds", "answer_seconds", "tokens_per_second",
    "most_users", "longest_context", "quantisations", "specialists",
}  # fmt: skip
SEED = ("--model", "deepseek-coder-6.7b", "--copies", "6", "--weights", "fp16", "--gpu", "RTX 5060 Ti 16GB")


@pytest.fixture
def graft(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["graft", "plan", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return ended.value.code or 0, output.out, output.err

    return run


def test_every_figure_is_an_object_with_a_range(graft):
    code, out, _ = graft("--model", "qwen2.5-coder-7b", "--gpu", "RTX 4090", "--json")
    answer = json.loads(out)
    assert code == 0
    assert set(answer) >= KEYS
    for key in ("memory_gib", "answer_seconds", "first_token_seconds", "most_users", "longest_context"):
        figure = answer[key]
        assert set(figure) == {"value", "low", "high", "unit"}
        assert figure["low"] <= figure["value"] <= figure["high"]
    assert set(answer["parts_gib"]) == {"weights", "adapters", "cache", "workspace", "runtime"}


def test_a_plan_that_does_not_fit_exits_with_1_and_still_answers(graft):
    code, out, _ = graft(*SEED, "--gpus", "2", "--users", "6", "--json")
    answer = json.loads(out)
    assert code == 1
    assert answer["fits"] is False
    wide = answer["specialists"][0]
    assert 6 * wide["one_model_gib"]["value"] == pytest.approx(75.3, abs=0.1)


def test_a_limit_that_is_not_met_ends_with_one(graft):
    where = ("--model", "qwen2.5-coder-7b", "--cpu", "EPYC 9454P", "--ram", "128", "--context", "800")
    assert graft(*where, "--limit", "12")[0] == 0
    assert graft(*where, "--limit", "5")[0] == 1
    assert graft(*where, "--weights", "bf16", "--limit", "12")[0] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model", "no-such-model"),
        ("--model", "smollm2-135m", "--weights", "3bit"),
        ("--model", "smollm2-135m", "--engine", "ollama"),
        ("--model", "smollm2-135m", "--cpu", "EPYC 9454P", "--engine", "vllm"),
        ("--model", "smollm2-135m", "--gpu", "RTX 4090", "--engine", "embedded"),
        ("--model", "smollm2-135m", "--context", "400", "--answer", "500"),
    ],
)
def test_a_mistake_is_named_with_its_fix(graft, wrong):
    code, out, _ = graft(*wrong, "--json")
    assert code == 2
    assert json.loads(out)["fix"]


def test_a_config_file_will_do_for_a_model(graft, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = graft("--model", str(tmp_path / "config.json"), "--gpu", "RTX 4090", "--json")
    assert code == 0
    assert json.loads(out)["question"]["shape"]["layers"] == 4


def test_without_a_name_the_cards_of_this_machine_are_meant(graft, monkeypatch):
    two = "0, GPU-a, NVIDIA GeForce RTX 4090, 24564\n1, GPU-b, NVIDIA GeForce RTX 4090, 24564\n"
    monkeypatch.setattr(fit, "ask_driver", lambda: two)
    machine = json.loads(graft("--model", "smollm2-135m", "--json")[1])["question"]["machine"]
    assert machine["gpu"]["name"] == "RTX 4090"
    assert machine["gpu"]["memory_gib"] == 24564 / 1024
    assert machine["gpus"] == 2


def test_a_machine_without_a_card_serves_on_its_processor(graft, monkeypatch):
    monkeypatch.setattr(fit, "ask_driver", lambda: "")
    here = DeviceFacts(kind="cpu", name="A processor of next year", memory_gib=16, threads=8)
    monkeypatch.setattr(fit, "describe_device", lambda: here)
    answer = json.loads(graft("--model", "smollm2-135m", "--json")[1])
    assert answer["question"]["engine"] == "llama.cpp"
    assert answer["question"]["machine"]["cpu"]["cores"] == 8
    assert answer["available_gib"]["value"] < 16
    assert any("guessed" in note for note in answer["notes"])
    assert answer["sources"]


def test_neither_torch_nor_numpy_is_needed():
    script = (
        "import sys\n"
        "sys.argv = ['graft', 'plan', 'serve', '--model', 'smollm2-135m', '--cpu', 'EPYC 9454P', '--json']\n"
        "from graftwork.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
