"""The tracer follows real modules on the `meta` device; the computed peak agrees with it."""

import json
import sys
from typing import Any

import pytest

from graftwork.costmodel.plain_step import plain_trace
from graftwork.records.plan import ModelShape, PlainSetup

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PHI_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def config_of(family: str, *, layers: int = 2) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": family in ("gemma", "qwen3"),
        "pad_token_id": 0,
    }
    if family in ("qwen3", "gemma"):
        config["head_dim"] = 64
    return config


def shape_of(config: dict[str, Any]) -> ModelShape:
    return ModelShape(
        name="traced",
        hidden_size=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=64,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied_embeddings=config["tie_word_embeddings"],
        max_positions=4096,
    )


def setup_of(family: str, **changed: Any) -> PlainSetup:
    targets = PHI_LINEARS if family == "phi3" else LINEARS
    given = {"targets": targets, "adapted_layers": 2, "tokens": 1024, **changed}
    return PlainSetup.model_validate(given)


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "olmo2")
SETUPS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "checkpointed-fused": {"method": "lora", "checkpointed": 2, "loss": "fused"},
    "full": {"method": "full", "autocast": False, "checkpointed": 1, "optimizer": "adamw_foreach"},
}
QUICK = {"lora": FAMILIES, "checkpointed-fused": ("llama", "gemma"), "full": ("qwen3", "phi3")}
PAIRS = [
    pytest.param(family, name, marks=() if family in QUICK[name] else pytest.mark.slow)
    for name in SETUPS
    for family in FAMILIES
]


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_computed_and_traced_peaks_agree_within_one_percent(family: str, name: str) -> None:
    from graftwork.costmodel.trace import trace_run

    config, setup = config_of(family), setup_of(family, **SETUPS[name])
    traced = trace_run(config, setup)
    computed = plain_trace(shape_of(config), setup, architecture=family)
    assert computed.peak.allocated == pytest.approx(traced.peak.allocated, rel=0.01)


@pytest.mark.parametrize("upcast", [True, False])
def test_four_bits_agree_too(upcast: bool) -> None:
    pytest.importorskip("bitsandbytes")
    from graftwork.costmodel.trace import trace_run

    setup = setup_of("qwen2", method="qlora", kbit_upcast=upcast, checkpointed=2)
    config = config_of("qwen2")
    computed = plain_trace(shape_of(config), setup, architecture="qwen2")
    assert computed.peak.allocated == pytest.approx(trace_run(config, setup).peak.allocated, rel=0.01)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "dora"},
        {"adapter_dtype": "bfloat16", "autocast": False},
        {"autocast": False},
        {"method": "full", "dtype": "float32", "optimizer": "adamw_loop"},
        {"rows": 3, "tokens": 300, "adapted_layers": 1},
    ],
    ids=["dora", "half-adapters", "no-autocast", "float32", "rows"],
)
def test_other_settings_agree_within_two_percent(changed: dict[str, Any]) -> None:
    from graftwork.costmodel.trace import trace_run

    config, setup = config_of("llama"), setup_of("llama", **changed)
    traced = trace_run(config, setup)
    computed = plain_trace(shape_of(config), setup)
    assert computed.peak.allocated == pytest.approx(traced.peak.allocated, rel=0.02)


def test_the_process_answers_with_one_json_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from graftwork.costmodel.trace import main

    question = {
        "config": config_of("llama"),
        "setup": setup_of("llama").model_dump(mode="json"),
        "events": True,
    }
    monkeypatch.setattr(sys, "argv", ["trace", json.dumps(question)])
    assert main() == 0
    line = json.loads(capsys.readouterr().out)
    assert line["peak"]["allocated"] > 0
    assert len(line["sizes"]) == sum(event >= 0 for event in line["events"])
