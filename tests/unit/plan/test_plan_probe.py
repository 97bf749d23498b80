"""A probe is of this device or is not given out; it reports its progress, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graftwork.model import probe as rates
from graftwork.model.probe import name_device
from graftwork.plan import probe as probing
from graftwork.plan.probe import keep_probe, run_probe, shape_to_probe, stored_probe
from graftwork.project.folder import open_project
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.plan import DeviceName, ModelShape, ProbeFacts, ProbeJob
from graftwork.train.probe_process import probe

TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    tied_embeddings=True,
    max_positions=512,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def make_facts(*, device: DeviceName | None = None, shape: ModelShape = TINY, at="2026-11-15T12:00:00"):
    return ProbeFacts(
        device=device or name_device(),
        memory_gib=8,
        threads=2,
        shape=shape,
        rank=16,
        copy_bytes_s=1e10,
        seconds=1,
        at=at,
    )


def test_a_probe_of_this_device_is_found_again():
    facts = make_facts()
    keep_probe(facts, None)
    assert stored_probe() == facts


@pytest.mark.parametrize(
    "changes", [{"name": "another"}, {"driver": "1.2"}, {"torch": "0.1"}, {"kind": "cuda"}]
)
def test_a_probe_of_another_device_driver_or_torch_is_not_given_out(changes):
    keep_probe(make_facts(device=name_device().model_copy(update=changes)), None)
    assert stored_probe() is None


def test_looking_for_a_probe_does_not_load_torch():
    code = "import sys; from graftwork.plan.probe import stored_probe; stored_probe()"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_project_has_its_own_probe_and_shares_it_with_the_users_others(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "graft.yaml").write_text("project: p\ndata:\n  logs: [log.jsonl]\n")
    project = open_project(tmp_path)
    files = keep_probe(make_facts(), project)
    assert len(files) == 2
    assert files[0].is_relative_to(project.state)
    files[0].unlink()
    assert stored_probe(project) == make_facts()


def test_of_several_probes_the_nearest_in_shape_is_taken():
    large = TINY.model_copy(update={"hidden_size": 512, "intermediate_size": 2048, "name": "large"})
    keep_probe(make_facts(shape=large, at="2026-11-14T12:00:00"), None)
    keep_probe(make_facts(), None)
    assert stored_probe(shape=large.model_copy(update={"hidden_size": 448})).shape.name == "large"
    assert stored_probe(shape=TINY).shape.name == "tiny"
    assert stored_probe().shape.name == "tiny"


def test_a_probe_of_another_version_is_ignored():
    file = keep_probe(make_facts(), None)[0]
    file.write_text('{"device": 3}')
    assert stored_probe() is None


def test_without_a_project_and_a_name_there_is_nothing_to_probe():
    with pytest.raises(UserError, match="no model"):
        shape_to_probe(None, None)


def test_a_model_of_the_catalog_can_be_probed_without_a_project():
    assert shape_to_probe(None, "deepseek-coder-6.7b").hidden_size == 4096


@pytest.fixture
def small_goes(monkeypatch):
    """Less to copy and to write: what is measured does not matter here."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(rates, "COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(rates, "CPU_GO_SECONDS", 0.0005)
    monkeypatch.setattr(rates, "LAUNCHES", 20)
    monkeypatch.setattr(rates, "DISK_BYTES", 2**20)
    monkeypatch.setattr(rates, "DISK_PIECE", 2**18)
    yield
    torch.set_num_threads(threads)


def test_a_processor_is_probed_whole(tmp_path, capsys, small_goes):
    """Products, copies, disk, and real steps of two and four layers; each is reported first."""
    facts = probe(ProbeJob(shape=TINY, folder=str(tmp_path), length=32, threads=1, seconds=600))
    assert facts.device == name_device()
    assert facts.copy_bytes_s > 0
    assert facts.disk_write_bytes_s > 0
    assert {step.layers for step in facts.steps} == {2, 4}
    assert all(step.seconds > 0 and step.tuning is None for step in facts.steps)
    assert facts.left_out == ()
    reported = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert len(reported) >= 6
    assert reported[0]["left_seconds"] > reported[-1]["left_seconds"]
    assert list(tmp_path.iterdir()) == []


def test_probes_beyond_the_time_limit_are_left_out_and_named(tmp_path, small_goes):
    facts = probe(ProbeJob(shape=TINY, folder=str(tmp_path), length=32, threads=1, seconds=1e-9))
    assert facts.steps == ()
    assert any("4 layers" in missing for missing in facts.left_out)


def test_a_part_that_fails_does_not_cost_the_others(tmp_path, monkeypatch, small_goes):
    def fail(_folder: Path) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(rates, "measure_disk", fail)
    facts = probe(ProbeJob(shape=TINY, folder=str(tmp_path), threads=1, seconds=1e-9))
    assert facts.disk_write_bytes_s is None
    assert "the disk: no such disk" in facts.left_out
    assert facts.copy_bytes_s > 0


def make_child(tmp_path, monkeypatch, script):
    """A stand-in for the interpreter that the probe's process is started with."""
    file = tmp_path / "child"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(probing.sys, "executable", str(file))


def test_the_childs_line_becomes_facts_and_its_progress_is_heard(tmp_path, monkeypatch):
    facts, heard = make_facts(), []
    output = json.dumps({"doing": "the disk", "left_seconds": 3.5})
    (tmp_path / "facts").write_text(facts.model_dump_json() + "\n")
    make_child(tmp_path, monkeypatch, f"echo '{output}' >&2; echo some warning >&2; cat {tmp_path}/facts")
    job = ProbeJob(shape=TINY, folder=str(tmp_path))
    assert run_probe(job, on_part=lambda *reported: heard.append(reported)) == facts
    assert heard == [("the disk", 3.5)]


def test_a_child_that_fails_is_reported_with_its_last_message(tmp_path, monkeypatch):
    make_child(tmp_path, monkeypatch, "echo No module named torch >&2; exit 1")
    with pytest.raises(EnvironmentFailure, match="gave no result") as reported:
        run_probe(ProbeJob(shape=TINY, folder=str(tmp_path)))
    assert reported.value.why == "No module named torch"


@pytest.mark.parametrize("script", ["sleep 600", "sleep 600 & sleep 600"], ids=["itself", "with a child"])
def test_a_probe_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch, script):
    make_child(tmp_path, monkeypatch, f"echo waiting for the driver >&2; {script}")
    job = ProbeJob(shape=TINY, folder=str(tmp_path), seconds=0.1)
    with pytest.raises(EnvironmentFailure, match="hung") as reported:
        run_probe(job)
    assert "waiting for the driver" in reported.value.why
