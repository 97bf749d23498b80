"""Manifests and configs that somebody else wrote: refused with a reason, without a crash and in time."""

import importlib.util
import json
from pathlib import Path

import pytest

from graftwork.files.safetensors import read_header
from graftwork.model.adapter_shape import AdapterShape, from_peft, parse_peft, to_peft
from graftwork.records.errors import Corrupted, GraftError
from graftwork.registry.manifest import ReleaseContext
from graftwork.registry.peft import import_peft_folder, inspect_adapter

TARGET = Path(__file__).parents[1] / "fuzz" / "fuzz_manifests.py"
PATHS = [f"model.layers.{number}.self_attn.q_proj" for number in range(40)]
GOOD = to_peft(AdapterShape(rank=8, alpha=16.0, targets=("q_proj",), layers=(0, 1)), "base")


def test_broken_manifests_raise_nothing_but_our_own_errors(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TARGET.parent))
    spec = importlib.util.spec_from_file_location("fuzz_manifests", TARGET)
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    samples = fuzz.Samples(tmp_path)
    for seed in range(60):
        fuzz.fuzz_once(samples, tmp_path, seed)


def shape_of(config: dict) -> AdapterShape:
    text = json.dumps(config).encode()
    return from_peft(parse_peft(text, where="here"), layers=40, paths=PATHS, where="here")


CONFIGS = {
    "no rank": {"r": None},
    "a rank of zero": {"r": 0},
    "a rank below zero": {"r": -8},
    "a rank beyond any layer": {"r": 10**30},
    "an infinite rank": {"r": float("inf")},
    "an alpha that is no number": {"lora_alpha": float("nan")},
    "an alpha of 400 digits": {"lora_alpha": 10**400},
    "targets that are a number": {"target_modules": 7},
    "targets that are numbers": {"target_modules": [7]},
    "layers that are a number and a half": {"layers_to_transform": 1.5},
    "layers that are words": {"layers_to_transform": ["one"]},
    "ranks that are a list": {"rank_pattern": ["q_proj"]},
    "a rank of zero for one layer": {"rank_pattern": {"q_proj": 0}},
    "a pattern that is none": {"rank_pattern": {"(": 4}},
    "a pattern without an end": {"rank_pattern": {"(.*.*)*x": 4}},
    "many repetitions": {"alpha_pattern": {".*" * 12 + "x": 4.0}},
    "many options": {"alpha_pattern": {"a?" * 30 + "a" * 30: 4.0}},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_config_that_cannot_be_used_is_refused(kind):
    with pytest.raises(Corrupted) as refused:
        shape_of({**GOOD, **CONFIGS[kind]})
    assert refused.value.fix


@pytest.mark.parametrize("key", ["r", "lora_alpha", "target_modules", "peft_type"])
def test_an_adapter_config_without_what_it_needs_is_refused(key):
    with pytest.raises(GraftError):
        shape_of({name: value for name, value in GOOD.items() if name != key})


@pytest.mark.parametrize("text", [b"", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}"])
def test_an_adapter_config_that_is_no_object_is_refused(text):
    with pytest.raises(Corrupted):
        parse_peft(text, where="here")


def test_the_patterns_that_peft_writes_are_taken():
    patterns = {
        "q_proj": 4,
        r"model\.layers\.3\.self_attn\.q_proj": 5,
        "^model.layers.0.self_attn.q_proj": 6,
        ".*layers.(1|2).*q_proj": 7,
    }
    shape = shape_of({**GOOD, "rank_pattern": patterns})
    assert shape.ranks == patterns


def write_folder(folder: Path, *, config: str, header: str) -> Path:
    (folder / "adapter_config.json").write_text(config)
    text = header.encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\1\2\3\4")
    return folder


HEADER = '{"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize(
    ("config", "header"),
    [
        ('{"peft_type": "LORA", "base_model_name_or_path": "\\ud800"}', HEADER),
        ('{"peft_type": "\\udc00"}', HEADER),
        ("[" * 100_000, HEADER),
        ('{"peft_type": "LORA"}', "[" * 100_000),
        ('{"peft_type": "LORA"}', HEADER.replace("[0, 4]", "[0, 1e999]")),
        ('{"peft_type": "LORA"}', HEADER.replace("[0, 4]", "[0, " + "9" * 5000 + "]")),
        ('{"peft_type": "LORA"}', "[]"),
        ('{"peft_type": "LORA"}', "{}"),
    ],
)
def test_a_peft_folder_with_a_hostile_config_or_header_is_refused(tmp_path, config, header):
    folder = write_folder(tmp_path, config=config, header=header)
    context = ReleaseContext(
        project="p",
        base="b",
        base_fingerprint="f",
        template_fingerprint="t",
        parent=None,
        created_at="now",
        settings={},
        versions={},
    )
    with pytest.raises(GraftError) as refused:
        import_peft_folder(folder, context=context)
    assert refused.value.fix
    with pytest.raises(GraftError):
        inspect_adapter(folder, expected_hash="")


def test_a_header_that_would_not_fit_in_memory_is_not_read(tmp_path):
    path = tmp_path / "adapter_model.safetensors"
    with path.open("wb") as handle:
        handle.write((90_000_000).to_bytes(8, "little"))
        handle.truncate(90_000_008)
    with pytest.raises(Corrupted, match="not a safetensors file"):
        read_header(path, fix="")
