"""What Slurm answers to a mistake is explained; its commands are small scripts here."""

import pytest
from fleet_samples import trial_bundle
from place_contract import order

from graftwork.fleet.jobs import choose_offer
from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.places.slurm import SlurmPlace, SlurmSettings
from graftwork.records.errors import NegativeResult


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Write the commands of a cluster; returns its place."""

    def make(**scripts):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, body in {
            "squeue": "",
            "scancel": "",
            "sinfo": "echo 'gpu* 2 gpu:a100:1'",
            **scripts,
        }.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return SlurmPlace(SlurmSettings(folder=str(tmp_path / "shared")))

    return make


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ("(null)", []),
        ("gpu:4", [("gpu", 4)]),
        ("gpu:a100:8(S:0-1)", [("a100", 8)]),
        ("gpu:3090:2(S:0,1),shard:8,gpu:t4:1", [("3090", 2), ("t4", 1)]),
        ("craynetwork:4,mps:400", []),
    ],
)
def test_the_gpus_of_a_node_are_counted_by_kind(cluster, resources, gpus):
    place = cluster(sinfo=f"echo 'long* 2 {resources}'")
    first, *others = [(offer.gpu, offer.gpus) for offer in place.offer()]
    assert first == ("", 0), "what a job gets where nothing asks for a GPU"
    assert others == gpus


def test_a_job_asks_slurm_for_the_gpus_of_the_settings_or_of_its_order(cluster, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    place = cluster()

    def asked(gpu, **settings):
        place._settings = SlurmSettings(folder=str(tmp_path), **settings)
        words = place._options(order(bundle).model_copy(update={"gpu": gpu}))
        return [word for word in words if word.startswith("--gres")]

    assert asked("") == []
    assert asked("a100") == ["--gres=gpu:a100:1"]
    assert asked("gpu", gpus=2) == ["--gres=gpu:2"]
    assert [(offer.gpu, offer.gpus) for offer in place.offer()] == [("a100", 1)]


def fails(*lines):
    return "\n".join([*(f"echo 'sbatch: error: {line}' >&2" for line in lines), "exit 1"])


@pytest.mark.parametrize(
    ("lines", "fix"),
    [
        (
            ["Batch job submission failed: Invalid account or account/partition combination"],
            "check partition",
        ),
        (["Batch job submission failed: Requested node configuration is not available"], "gpus"),
        (
            [
                "QOSMaxSubmitJobPerUserLimit",
                "Batch job submission failed: Job violates accounting/QOS policy",
            ],
            "ask for more",
        ),
    ],
)
def test_a_job_that_slurm_refuses_is_explained(cluster, tmp_path, lines, fix):
    place, (bundle, _) = cluster(sbatch=fails(*lines)), trial_bundle(tmp_path)
    with pytest.raises(Refused) as caught:
        place.submit(order(bundle), secrets={})
    assert lines[-1] in caught.value.what
    assert fix in caught.value.fix


def test_a_controller_that_does_not_answer_is_no_refusal(cluster, tmp_path):
    unable = fails("Batch job submission failed: Unable to contact slurm controller (connect failure)")
    place, (bundle, _) = cluster(sbatch=unable), trial_bundle(tmp_path)
    with pytest.raises(PlaceUnreachable) as caught:
        place.submit(order(bundle), secrets={})
    assert "SLURM_CONF" in caught.value.fix


def test_a_machine_without_slurm_and_a_card_that_is_not_there_are_explained(cluster, monkeypatch, tmp_path):
    place = cluster()
    with pytest.raises(NegativeResult, match="slurm offers no H200 now") as caught:
        choose_offer(place, "H200")
    assert "a100" in caught.value.why
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(Refused, match="there is no sinfo on this machine") as caught:
        place.offer()
    assert "login node" in caught.value.fix


def test_a_node_without_the_python_is_seen_in_the_reason(cluster, tmp_path):
    """The queue runs the script, and Python is not there: nothing writes how it ended."""
    place, (bundle, _) = cluster(sbatch="true"), trial_bundle(tmp_path)
    job = place.submit(order(bundle), secrets={})
    log = tmp_path / "shared" / "jobs" / job.label / "job.log"
    log.write_text("job.sh: 3: exec: /no/python: not found\n")
    found = place.poll(job)
    assert found.phase == "ended"
    assert "its log ends with: job.sh: 3: exec: /no/python: not found" in found.message
    log.unlink()
    assert "its log" not in place.poll(job).message
