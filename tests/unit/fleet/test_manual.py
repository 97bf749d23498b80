"""The manual place: a bundle and a notebook go out, results come back."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from fleet_drill import MemoryLedger
from fleet_samples import trial_bundle
from place_contract import order

from graftwork.fleet.control import Controller
from graftwork.fleet.place import make_label
from graftwork.fleet.places.manual import BUNDLE_ARCHIVE, NOTEBOOK, RESULTS, ManualPlace
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import EnvironmentFailure, UserError


@pytest.fixture
def place(tmp_path):
    return ManualPlace(tmp_path / "manual")


def run_notebook(folder):
    """Run the cells as a notebook would."""
    for cell in json.loads((folder / NOTEBOOK).read_text())["cells"]:
        text = cell["source"]
        if cell["cell_type"] == "code" and text.startswith("!"):
            words = text[1:].replace("python", sys.executable, 1).split()
            subprocess.run(words, cwd=folder, check=True, capture_output=True)
        elif cell["cell_type"] == "code":
            subprocess.run([sys.executable, "-c", text], cwd=folder, check=True)


def test_a_job_goes_out_as_a_notebook_and_its_results_come_back(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    ordered = order(bundle)
    job = place.submit(ordered, secrets={})
    assert place.submit(ordered, secrets={}) == job
    assert place.list() == (job,)
    with pytest.raises(EnvironmentFailure, match="does not have"):
        place.fetch(job, tmp_path / "run")
    there = tmp_path / "colab"
    shutil.copytree(place.folder_of(job), there)
    run_notebook(there)
    place.receive(job, there / RESULTS)
    assert (place.poll(job).phase, place.poll(job).exit_code) == ("ended", 0)
    assert place.list() == ()
    place.fetch(job, tmp_path / "run")
    assert (tmp_path / "run" / "adapter" / "trial.txt").exists()
    place.receive(job, there / f"work-{ordered.job_id}")  # once more, as a folder


def test_secrets_are_asked_for_by_the_notebook_and_written_nowhere(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={"HF_TOKEN": "hf_s3cr3tvalue"})
    texts = [path.read_bytes() for path in place.folder_of(job).iterdir()]
    assert any(b"HF_TOKEN" in text for text in texts)
    assert not any(b"s3cr3t" in text for text in texts)


def test_what_is_no_result_is_refused_and_nothing_is_lost(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={})
    with pytest.raises(UserError, match="not the results of a job"):
        place.receive(job, place.folder_of(job) / BUNDLE_ARCHIVE)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserError, match="cannot be read"):
        place.receive(job, tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("../outside", "")
    with pytest.raises(UserError, match="outside"):
        place.receive(job, tmp_path / "odd.zip")
    for content in ("no JSON", "{}", '{"code": "x", "reason": ""}'):
        (tmp_path / "half" / "run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "half" / "exit.json").write_text(content)
        with pytest.raises(UserError, match="not the results of a job"):
            place.receive(job, tmp_path / "half")
    with pytest.raises(UserError, match="cannot be read"):
        place.receive(job, tmp_path / "not there")
    assert place.list() == (job,)
    place.stop(job)
    assert (place.list(), place.poll(job).exit_code) == ((), 75)


def test_a_job_that_is_given_up_without_results_is_closed_at_once(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    ledger = MemoryLedger()
    controller = Controller(place, ledger)
    controller.collect = lambda job: place.fetch(job.placed, tmp_path / "run")
    ordered = order(bundle).model_copy(update={"label": make_label(ledger.key, order(bundle).job_id)})
    job = controller.start(ordered, caps=CapSettings(), now=1000.0)
    controller.reconcile(now=1001.0)
    assert ledger.get(job.id).is_open
    controller.stop(ledger.get(job.id), now=1002.0)
    controller.reconcile(now=1003.0)
    assert (ledger.get(job.id).state, ledger.get(job.id).reason) == (
        "stopped",
        "abandoned before its results came back",
    )


def run_by_hand(place, job, folder):
    """As a person does: the files of the job go into a folder that may hold those of others."""
    shutil.copytree(place.folder_of(job), folder, dirs_exist_ok=True)
    run_notebook(folder)
    return folder / RESULTS


def test_a_folder_that_stays_between_sessions_does_not_mix_runs(place, tmp_path):
    folder = tmp_path / "studio"
    for number, seed in enumerate(("first", "second"), 1):
        bundle, _ = trial_bundle(tmp_path, run_id=f"run{number}", job={"seed": seed})
        job = place.submit(order(bundle, number), secrets={})
        place.receive(job, run_by_hand(place, job, folder))
        place.fetch(job, tmp_path / seed)
    alone, _ = trial_bundle(tmp_path, run_id="run2", job={"seed": "second"})
    job = place.submit(order(alone, 3), secrets={})
    place.receive(job, run_by_hand(place, job, tmp_path / "fresh"))
    place.fetch(job, tmp_path / "alone")
    found = [(tmp_path / name / "adapter/trial.txt").read_text() for name in ("first", "second", "alone")]
    assert found[1] == found[2] != found[0]


def test_results_of_another_run_are_refused_by_name(place, tmp_path):
    first, _ = trial_bundle(tmp_path)
    other, _ = trial_bundle(tmp_path, run_id="run2")
    job = place.submit(order(first), secrets={})
    results = run_by_hand(place, place.submit(order(other, 2), secrets={}), tmp_path / "colab")
    with pytest.raises(UserError, match="results of the run run2, not of run1"):
        place.receive(job, results)
    assert place.list()[0] == job
    assert place.poll(job).phase == "starting"


def test_what_an_interrupted_receive_left_is_not_taken_for_the_results(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={})
    left = place.folder_of(job) / ".received"
    (left / "run").mkdir(parents=True)
    (left / "exit.json").write_text(json.dumps({"code": 75, "reason": "an earlier session"}))
    place.receive(job, run_by_hand(place, job, tmp_path / "colab"))
    assert (place.poll(job).exit_code, left.exists()) == (0, False)
