"""The manual place: a bundle and a notebook go out, results come back."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
from fleet_samples import trial_bundle
from place_contract import order

from graftwork.fleet.manual import BUNDLE_ARCHIVE, NOTEBOOK, RESULTS, ManualPlace
from graftwork.records.errors import EnvironmentLacks, UserMistake


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
    with pytest.raises(EnvironmentLacks, match="does not have"):
        place.fetch(job, tmp_path / "run")
    there = tmp_path / "colab"
    shutil.copytree(place.folder_of(job), there)
    run_notebook(there)
    place.receive(job, there / RESULTS)
    assert (place.poll(job).phase, place.poll(job).exit_code) == ("ended", 0)
    assert place.list() == ()
    place.fetch(job, tmp_path / "run")
    assert (tmp_path / "run" / "adapter" / "trial.txt").exists()
    place.receive(job, there / "work")  # once more, as a folder


def test_secrets_are_asked_for_by_the_notebook_and_written_nowhere(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={"HF_TOKEN": "hf_s3cr3tvalue"})
    texts = [path.read_bytes() for path in place.folder_of(job).iterdir()]
    assert any(b"HF_TOKEN" in text for text in texts)
    assert not any(b"s3cr3t" in text for text in texts)


def test_what_is_no_result_is_refused_and_nothing_is_lost(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={})
    with pytest.raises(UserMistake, match="no results of a job"):
        place.receive(job, place.folder_of(job) / BUNDLE_ARCHIVE)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(UserMistake, match="cannot be read"):
        place.receive(job, tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("../outside", "")
    with pytest.raises(UserMistake, match="outside"):
        place.receive(job, tmp_path / "odd.zip")
    assert place.list() == (job,)
    place.stop(job)
    assert (place.list(), place.poll(job).exit_code) == ((), 75)
