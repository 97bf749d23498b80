"""Every model of a project in one go: the same bytes as one by one, and one that fails stops no other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flows import opened
from safetensors.torch import load_file

from graftwork.files.disk import Journal, file_digest
from graftwork.model.base import find_base
from graftwork.model.load import tensors_digest
from graftwork.pipeline.table import run_pipeline
from graftwork.process.alert import ALERTS_FILE
from graftwork.project.supervise import JOB_FILE
from graftwork.records.errors import Corrupted, EnvironmentFailure, UserError
from graftwork.records.run import TrainOutcome
from graftwork.registry.export import EXPORT_FILE, export_run
from graftwork.store.schema import runs
from graftwork.train.all_models import train_all
from graftwork.train.checkpoints import TENSORS
from graftwork.train.run_folder import ADAPTER, CHECKPOINTS

SMALL = {"rank": 2, "epochs": 1, "batch_size": 4, "checkpoint_every": 2, "threads": 1, "max_rows": 16}


def write_models(folder: Path, models: dict) -> None:
    """The order of the models counts: the first is the main one."""
    settings = yaml.safe_load((folder / "graft.yaml").read_text())
    settings["train"] = {**SMALL, "validation_rows": 4}
    settings["models"] = models
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def run_all(folder, reporter=None):
    with opened(folder, reporter) as work:
        return train_all(work)


def run_one(folder, model):
    with opened(folder, model=model) as work:
        return run_pipeline(work, upto="train").get("train", TrainOutcome)


def alerts_of(run: Path) -> list[str]:
    return [line["kind"] for line in Journal(run / ALERTS_FILE).read()]


def tensors_of(run: Path) -> dict[str, str]:
    """Every checkpoint that was kept, and the adapter."""
    found = {path.name: file_digest(path) for path in (run / ADAPTER).iterdir()}
    for path in (run / CHECKPOINTS).rglob(TENSORS):
        # How chance stands at the start of a process is not the same in any two.
        kept = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("random/")}
        found[path.parent.name] = tensors_digest(kept)
    return found


def test_all_models_in_one_go_have_the_bytes_of_each_trained_alone(small_project, tmp_path):
    write_models(
        small_project,
        {
            "main": {"train": {"run": {"rehearse_crash": True}}},
            "special": {"train": {"start_from": "main", "learning_rate": 1e-3}},
        },
    )
    alone = tmp_path / "alone"
    shutil.copytree(small_project, alone)

    trained = run_all(small_project)

    assert [(model.model, model.state) for model in trained.models] == [
        ("main", "trained"),
        ("special", "trained"),
    ]
    main, special = (model.outcome for model in trained.models)
    assert main.restarts == 1  # killed once with -9, and the batch went on
    assert special.started_from == main.adapter_hash
    runs = small_project / ".graft" / "runs"
    assert alerts_of(runs / main.run_id) == ["restarted"]
    assert alerts_of(runs / special.run_id) == []

    # Asked for the specialist alone, its own way trains the main model first.
    assert run_one(alone, "special").adapter_hash == special.adapter_hash
    for outcome in (main, special):
        here, there = (folder / ".graft" / "runs" / outcome.run_id for folder in (small_project, alone))
        assert tensors_of(here) == tensors_of(there)

    again = run_all(small_project)
    assert {model.state for model in again.models} == {"unchanged"}
    assert [model.outcome for model in again.models] == [model.outcome for model in trained.models]


def test_a_model_that_fails_is_reported_with_its_reason_and_the_others_are_trained(small_project):
    write_models(
        small_project,
        {
            "main": {},
            "lost": {"train": {"start_from": "not/there"}},
            "unlike": {"train": {"start_from": "main", "rank": 4}},
            "good": {"train": {"seed": 3}},
        },
    )
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.cli.main", "train", "--all", "--json", "-C", str(small_project)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    models = {model["model"]: model for model in json.loads(done.stdout)["models"]}
    assert {name: one["state"] for name, one in models.items()} == {
        "main": "trained",
        "lost": "failed",
        "unlike": "failed",
        "good": "trained",
    }
    assert "no adapter to start from" in models["lost"]["error"]["what"]
    assert "a different shape" in models["unlike"]["error"]["what"]
    with opened(small_project) as work:
        assert work.runs.get(models["unlike"]["run_id"]).state == "failed"
        runs = Path(work.project.runs)
    assert alerts_of(runs / models["unlike"]["run_id"]) == ["failed"]
    assert alerts_of(runs / models["good"]["run_id"]) == []
    with opened(small_project) as work:
        assert work.ledger.get("train@good").output["run_id"] == models["good"]["run_id"]

    # Mended, only what failed is trained.
    write_models(small_project, {"main": {}, "unlike": {"train": {"start_from": "main"}}})
    fixed = run_all(small_project)
    assert [(model.model, model.state) for model in fixed.models] == [
        ("main", "unchanged"),
        ("unlike", "trained"),
    ]


@pytest.fixture
def trained_project(small_project):
    write_models(small_project, {"main": {"train": {"method": "dora", "modules": {"q_proj": {"rank": 4}}}}})
    run_one(small_project, None)
    return small_project


def test_an_export_is_proven_and_the_base_is_left_alone(trained_project, tmp_path, tiny_base, monkeypatch):
    before = find_base(str(tiny_base), project_folder=tmp_path)
    with opened(trained_project) as work:
        merged = export_run(work, run=None, to=tmp_path / "merged")
        adapter = export_run(work, run=merged.run_id[:6], to=tmp_path / "adapter", format="adapter")
        with pytest.raises(UserError, match="already exists"):
            export_run(work, run=None, to=tmp_path / "merged")
        with pytest.raises(UserError, match="no trained run"):
            export_run(work, run="nothing", to=tmp_path / "nowhere")
        monkeypatch.setenv("GRAFT_GGUF_CONVERTER", str(tmp_path / "not there"))
        with pytest.raises(EnvironmentFailure, match="no converter"):
            export_run(work, run=None, to=tmp_path / "gguf", format="gguf")
        assert not (tmp_path / "gguf").exists()
        weights = Path(work.runs.get(merged.run_id).outcome["adapter_folder"]) / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes() + b" ")
        with pytest.raises(Corrupted):
            export_run(work, run=None, to=tmp_path / "damaged")
    found = merged.merged.agreement
    assert found.holds
    assert found.largest_difference < 1e-4
    assert found.positions > found.rows > 0
    assert merged.merged.merged_weights == 14
    for exported in (merged, adapter):
        message = json.loads((Path(exported.folder) / EXPORT_FILE).read_text())
        for name, digest in message["files"].items():
            assert file_digest(Path(exported.folder) / name) == digest
    assert find_base(str(tiny_base), project_folder=tmp_path) == before
    # The merged folder is a base like any other.
    assert find_base(merged.folder, project_folder=tmp_path).revision != before.revision


def test_a_run_that_another_version_stored_is_exported(trained_project, tmp_path):
    with opened(trained_project) as work:
        (run,) = work.runs.list()
        job_file = Path(run.folder) / JOB_FILE
        job_file.write_text(json.dumps({**json.loads(job_file.read_text()), "examined_file": None}))
        plan = {**run.plan, "renamed_since": None}
        with work.database.write() as connection:
            connection.execute(runs.update().where(runs.c.id == run.id).values(plan=plan))
        assert export_run(work, run=run.id, to=tmp_path / "merged").merged.agreement.holds


@pytest.mark.slow
@pytest.mark.skipif("GRAFT_GGUF_CONVERTER" not in os.environ, reason="no converter is named")
def test_a_gguf_file_by_the_named_converter_is_read_back_whole(trained_project, tmp_path):
    with opened(trained_project) as work:
        exported = export_run(work, run=None, to=tmp_path / "gguf", format="gguf")
    assert exported.merged.agreement.holds
    assert exported.gguf["blocks"] == 2
    assert [name for name in exported.files if name.endswith(".gguf")]
