"""The comparison of two checkouts: it names what differs, and its bound of the median is exact."""

import hashlib
import importlib.util
import itertools
import json
import math
import random
import struct
import sys
from pathlib import Path

import pytest
import yaml

SOURCE = Path(__file__).parents[3] / "tools" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_tool", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_tool"] = module
    spec.loader.exec_module(module)
    return module


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    encoded = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_project(folder: Path, *, seed: int = 0, run: str = "aa11") -> Path:
    """The state of a project whose rows and weights depend on a seed, as the stages leave it."""
    rows = f"rows of seed {seed}".encode()
    dataset = folder / ".graft" / "datasets" / hashlib.sha256(rows).hexdigest()
    (dataset / "train").mkdir(parents=True)
    (dataset / "train" / "00000.parquet").write_bytes(rows)
    (dataset / "packs.parquet").write_bytes(b"packs")
    (dataset / "drops.parquet").write_bytes(b"drops")
    (dataset / "manifest.json").write_text(json.dumps({"model": "main"}))
    adapter = folder / ".graft" / "runs" / run / "adapter"
    weights = random.Random(seed).randbytes(8)
    tensors = {"first": ("F32", [2], weights), "second": ("F32", [1], b"1234")}
    write_tensors(adapter / "adapter_model.safetensors", tensors)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter.parent / "job.json").write_text(json.dumps({"dataset_folder": str(dataset)}))
    state = {**tensors, "random/torch": ("U8", [4], random.randbytes(4))}
    write_tensors(adapter.parent / "checkpoints" / "step-000002" / "tensors.safetensors", state)
    return folder


def test_snapshots_of_equal_projects_are_equal_whatever_the_run_is_called(compare, tmp_path):
    first = compare.take_snapshot(write_project(tmp_path / "first", run="aa11"))
    second = compare.take_snapshot(write_project(tmp_path / "second", run="bb22"))
    assert first
    assert compare.find_differences(first, second) == []
    assert {item.split(": ")[1] for item in first} == {
        "dataset id",
        "row shards",
        "packs",
        "drops",
        "manifest",
        "adapter tensors",
        "adapter config",
        "checkpoint tensors",
    }


def test_another_seed_is_a_difference_named_by_file_and_tensor(compare, tmp_path):
    old = compare.take_snapshot(write_project(tmp_path / "old", seed=0))
    new = compare.take_snapshot(write_project(tmp_path / "new", seed=1))
    found = {(difference.item, difference.name) for difference in compare.find_differences(old, new)}
    assert found == {
        ("main: dataset id", "id"),
        ("main: row shards", "train/00000.parquet"),
        ("main: adapter tensors", "first"),
        ("main: checkpoint tensors", "first"),
    }


def test_a_missing_file_and_a_changed_dtype_are_differences(compare, tmp_path):
    old = compare.take_snapshot(write_project(tmp_path / "old"))
    folder = write_project(tmp_path / "new")
    next(folder.rglob("packs.parquet")).unlink()
    path = next(folder.rglob("adapter_model.safetensors"))
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    found = {(d.item, d.name) for d in compare.find_differences(old, compare.take_snapshot(folder))}
    adapter = "main: adapter tensors"
    assert found == {("main: packs", "packs.parquet"), (adapter, "first"), (adapter, "second")}


def test_comparing_bytes_exits_1_on_a_difference_and_runs_the_old_side_once(
    compare, tmp_path, monkeypatch, capsys
):
    made = []

    def make(checkout, example, changes):
        made.append(checkout.name)
        seed = 1 if checkout.name == "broken" else 0
        return compare.take_snapshot(write_project(tmp_path / str(len(made)), seed=seed))

    monkeypatch.setattr(compare, "make_snapshot", make)
    old, new, broken = (compare.Checkout(name, tmp_path) for name in ("old", "new", "broken"))
    options = {"cache": tmp_path / "cache", "examples": ["cited_answers"], "full": False}
    assert compare.compare_bytes(old, new, **options) == 0
    assert compare.compare_bytes(old, broken, **options) == 1
    assert made == ["old", "new", "broken"]
    assert "DIFFERS  cited_answers: main: adapter tensors: first" in capsys.readouterr().out


def test_a_copied_project_has_no_state_and_keeps_the_other_settings(compare, tmp_path):
    example = tmp_path / "example"
    (example / ".graft").mkdir(parents=True)
    settings = {"project": "p", "train": {"rank": 2, "run": {"rehearse_crash": True, "max_restarts": 1}}}
    (example / "graft.yaml").write_text(yaml.safe_dump(settings))
    changes = {"train": {"max_rows": 4, "run": {"rehearse_crash": False}}}
    copied = compare.copy_project(example, tmp_path / "copy", changes)
    assert not (copied / ".graft").exists()
    assert yaml.safe_load((copied / "graft.yaml").read_text()) == {
        "project": "p",
        "train": {"rank": 2, "max_rows": 4, "run": {"rehearse_crash": False, "max_restarts": 1}},
    }


@pytest.mark.parametrize("count", [5, 7, 9])
def test_the_bound_covers_the_median_as_often_as_it_says(compare, count):
    """With every sign equally likely, the bound is below the median in at most 5 % of the sign patterns."""
    sizes = [1.01 ** (number + 1) for number in range(count)]
    patterns = list(itertools.product((1, -1), repeat=count))
    below = sum(
        compare.bound_median([size**sign for size, sign in zip(sizes, pattern, strict=True)]) < 1
        for pattern in patterns
    )
    assert 0 < below / len(patterns) <= 0.05


def test_too_few_pairs_have_no_bound(compare):
    assert compare.bound_median([1.0, 1.0, 1.0, 1.0]) == math.inf


def test_a_stage_above_the_limit_fails_and_is_named(compare, capsys):
    pairs = [{"old": {"train": 1.0, "plan": 1.0}, "new": {"train": 1.2, "plan": 1.0}} for _ in range(7)]
    assert compare.print_speed(pairs, limit=1.05) == 1
    assert "above it: train\n" in capsys.readouterr().out
    assert compare.print_speed(pairs, limit=1.3) == 0


def test_the_time_of_a_command_includes_its_descendants(compare, tmp_path):
    (tmp_path / "src" / "small").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project.scripts]\ngraft = "small.command:run"\n')
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    (tmp_path / "src" / "small" / "__init__.py").touch()
    (tmp_path / "src" / "small" / "command.py").write_text(
        "import subprocess, sys\n"
        f"def run():\n    subprocess.run([sys.executable, '-c', {burn!r}])\n    return 4\n"
    )
    checkout = compare.Checkout("new", tmp_path)
    assert checkout.run([], cwd=tmp_path, passing=(4,)) >= 0.3
    with pytest.raises(compare.StageFailure, match="ended with 4"):
        checkout.run([], cwd=tmp_path)
