"""`graft train federated`: rounds survive a kill, nothing is trained twice, failed places are left out."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from ssh_server import running_sshd

from graftwork.api.project import open_project
from graftwork.data.project import PreparedData
from graftwork.files.dataset import read_manifest
from graftwork.files.disk import Journal, folder_digest, write_atomic
from graftwork.model.adapter_shape import AdapterShape, to_peft
from graftwork.model.probe import describe_device
from graftwork.pipeline.steps.plan import note_done
from graftwork.pipeline.steps.train import enter_run, make_job
from graftwork.pipeline.table import run_pipeline
from graftwork.records.errors import EnvironmentFailure, NegativeResult, UserError
from graftwork.records.hardware import Offer
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.train import federated as site_module
from graftwork.train.federated import FleetSites, plan_federation, run_federation

SIZES = {
    "q_proj": (64, 64),
    "k_proj": (64, 32),
    "v_proj": (64, 32),
    "o_proj": (64, 64),
    "gate_proj": (64, 128),
    "up_proj": (64, 128),
    "down_proj": (128, 64),
}
NAMES = ("north", "south", "west")


class Killed(BaseException):
    """As kill -9: nothing in between catches it."""


class FakeSites(FleetSites):
    """Places that train at once, with weights drawn by the run's id."""

    def __init__(self, work, *, down=(), fails=None, kill_at=None):
        super().__init__(work)
        self.__dict__["_device"] = describe_device()
        self.runs, self.training, self.trained = self, [], Counter()
        self.starts = {}
        self._down, self._fails, self._kill_at = down, Counter(fails or {}), kill_at

    def describe(self, site):
        if site.label in self._down:
            raise EnvironmentFailure(f"{site.label} cannot be reached", fix="")
        dataset = read_manifest(Path(site.data))
        dataset = dataset.model_copy(update={"content_hash": f"{site.label}-{dataset.content_hash}"})
        return PreparedData(folder=site.data, dataset=dataset, folders={}, portions=())

    def start(self, run):
        label = run.site.label
        self.training.append(run)
        if self._fails[label] > 0:
            self._fails[label] -= 1
            return
        if self._kill_at is not None and sum(self.trained.values()) == self._kill_at:
            raise Killed
        self.starts[run.run_id] = run.work.settings.train.start_from
        train_fake(run, rows=10 + NAMES.index(label))
        self.trained[run.run_id] += 1

    def ended(self):
        ended, self.training = self.training, []
        for run in ended:
            if run.is_trained:
                note_done(run.work, run.run_id)
            yield run.site.label, None, "" if run.is_trained else "the disk is full"

    def wait(self): ...


def train_fake(run, *, rows):
    """What a worker leaves: journal, adapter and outcome."""
    enter_run(run.work, make_job(run.work, run.outputs))
    shape = AdapterShape.model_validate(run.plan.train["adapter"])
    chance = np.random.default_rng(int(run.run_id, 16) % 2**32)
    tensors = {}
    for layer in shape.layers:
        for target in shape.targets:
            part = "self_attn" if target[0] in "qkvo" else "mlp"
            path = f"base_model.model.model.layers.{layer}.{part}.{target}"
            into, out = SIZES[target]
            tensors[f"{path}.lora_A.weight"] = chance.normal(size=(shape.rank, into)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = chance.normal(size=(out, shape.rank)).astype(np.float32)
    adapter = run.folder / "adapter"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps(to_peft(shape, run.plan.base)))
    step = TrainStep(
        step=1, loss=1, learning_rate=1, gradient_norm=1, tokens=50, trained_tokens=rows, seconds=1
    )
    Journal(run.folder / "steps.jsonl").append(step.model_dump(mode="json"))
    outcome = TrainOutcome(
        run_id=run.run_id,
        adapter_folder=str(adapter),
        adapter_hash=folder_digest(adapter),
        base_hash_before="b",
        base_hash_after="b",
        steps=1,
        epochs=1,
        first_loss=2.0,
        final_loss=1.0,
        validation_loss_before=2.0,
        validation_loss_after=1.0,
        seconds=1,
        load_seconds=1,
        tokens_per_second=1,
        peak_memory_gib=1,
        trainable_parameters=1,
        restarts=0,
        replayed_steps=0,
        replay_identical=None,
        rows=rows,
    )
    write_atomic(run.folder / "outcome.json", outcome.to_json())


@pytest.fixture
def federated(small_project, monkeypatch):
    offer = Offer(place="local", gpu="", gpus=0, usd_per_hour=0.0, instance="local", source="", dated="")
    monkeypatch.setattr(site_module, "choose_offer", lambda _place, _gpu: offer)
    with open_project(small_project).open() as work:
        run_pipeline(work, upto="prepare")
    (dataset,) = (small_project / ".graft" / "datasets").glob("*/manifest.json")
    settings = yaml.safe_load((small_project / "graft.yaml").read_text())
    places = [{"name": name, "place": "local", "data": str(dataset.parent)} for name in NAMES]
    settings["federated"] = {"rounds": 3, "places": places, "evaluate": False}
    settings["train"] |= {"proximal": 0.1}
    (small_project / "graft.yaml").write_text(yaml.safe_dump(settings))
    return small_project


@contextmanager
def at(sites):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site_module, "FleetSites", lambda _work: sites)
        yield


def run(folder, **asked):
    with open_project(folder).open() as work:
        sites = FakeSites(work, **asked)
        with at(sites):
            return run_federation(work), sites


def weights_of(adapter):
    return load_file(Path(adapter) / "adapter_model.safetensors")


def test_each_round_starts_from_the_average_of_the_last_one(federated):
    done, sites = run(federated)
    assert [number.number for number in done.rounds] == [1, 2, 3]
    assert max(sites.trained.values()) == 1
    assert len(sites.trained) == 9
    first, second, third = done.rounds
    assert {sites.starts[place.run_id] for place in first.places} == {None}
    assert {sites.starts[place.run_id] for place in second.places} == {
        first.adapter.removeprefix(f"{federated}/")
    }
    assert {sites.starts[place.run_id] for place in third.places} == {
        second.adapter.removeprefix(f"{federated}/")
    }
    assert [place.weight for place in first.places] == pytest.approx([10 / 33, 11 / 33, 12 / 33], abs=1e-6)


def test_the_average_is_that_of_the_changes_weighted_by_trained_tokens(federated):
    done, _ = run(federated)
    path = "base_model.model.model.layers.1.self_attn.k_proj"
    parts = []
    for place in done.rounds[0].places:
        found = weights_of(federated / ".graft" / "runs" / place.run_id / "adapter")
        parts.append(place.weight * found[f"{path}.lora_B.weight"] @ found[f"{path}.lora_A.weight"])
    whole = sum(parts)
    merged = weights_of(done.rounds[0].adapter)
    change = merged[f"{path}.lora_B.weight"] @ merged[f"{path}.lora_A.weight"]
    # The best approximation of rank 2 of a change of rank 6.
    u, values, v = np.linalg.svd(whole)
    assert change == pytest.approx((u[:, :2] * values[:2]) @ v[:2], abs=1e-3)


@pytest.mark.parametrize("moment", [0, 2, 4, 8])
def test_killed_at_any_place_of_any_round_it_goes_on_to_the_same_adapter(federated, moment):
    whole, _ = run(federated)
    for path in (federated / ".graft").iterdir():
        if path.name in ("runs", "federated"):
            shutil.rmtree(path)
    with pytest.raises(Killed):
        run(federated, kill_at=moment)
    done, sites = run(federated)
    assert len(sites.trained) == 9 - moment
    assert done.rounds[-1].adapter_hash == whole.rounds[-1].adapter_hash


def test_a_run_that_was_fetched_without_a_poll_of_the_federation_is_merged(federated):
    with pytest.raises(Killed):
        run(federated, kill_at=2)
    done, sites = run(federated)
    assert len(sites.trained) == 7
    assert [place.name for place in done.rounds[0].places] == list(NAMES)


def test_a_finished_federation_trains_nothing_again(federated):
    first, _ = run(federated)
    second, sites = run(federated)
    assert second == first
    assert not sites.trained


def test_a_place_that_fails_is_left_out_by_name_after_its_retries(federated):
    done, _ = run(federated, fails={"south": 2})
    assert done.rounds[0].left_out == {"south": "the disk is full"}
    assert [place.name for place in done.rounds[0].places] == ["north", "west"]
    assert [place.name for place in done.rounds[1].places] == list(NAMES)


def test_a_place_that_fails_once_is_tried_again(federated):
    done, _ = run(federated, fails={"south": 1})
    assert not done.rounds[0].left_out


def test_a_place_whose_job_trained_another_plan_is_tried_again(federated, monkeypatch):
    """As a job of an interrupted command, which was planned for another device."""
    ended = FakeSites.ended
    monkeypatch.setattr(FakeSites, "ended", lambda sites: ((name, job, "") for name, job, _ in ended(sites)))
    done, _ = run(federated, fails={"south": 1})
    assert [place.name for place in done.rounds[0].places] == list(NAMES)


def test_too_few_places_end_the_round_and_keep_what_is_trained(federated):
    with pytest.raises(NegativeResult, match="1 of the 2 places") as failure:
        run(federated, down=("south", "west"))
    assert "south cannot be reached" in failure.value.why
    done, sites = run(federated)
    assert len(sites.trained) == 8
    assert len(done.rounds) == 3


def test_the_same_data_at_two_places_is_refused(federated):
    with open_project(federated).open() as work:
        sites = FakeSites(work)
        data = sites.describe(work.project.settings.federated.places[0])
        sites.describe = lambda site: data.model_copy(update={"name": site.label})
        with at(sites), pytest.raises(UserError, match="the same data"):
            run_federation(work)


def test_the_plan_shows_places_that_cannot_take_part(federated):
    with open_project(federated).open() as work, at(FakeSites(work, down=("west",))):
        plan = plan_federation(work)
    assert [bool(place.why_not) for place in plan.places] == [False, False, True]
    assert plan.places[0].steps > 0
    assert plan.adapter_mb > 0
    assert not (federated / ".graft" / "federated").exists()


def test_the_places_description_of_its_data_holds_counts_and_hashes_only(federated):
    """By the commands that a host really runs."""
    with open_project(federated).open() as work:
        site = work.project.settings.federated.places[0]
        described = FleetSites(work).describe(site)
        text = described.to_json()
    manifest = read_manifest(Path(site.data))
    assert described.dataset.content_hash == manifest.content_hash
    assert described.dataset.splits["train"].rows == manifest.splits["train"].rows
    assert manifest.inputs[0].sha256 not in text
    assert manifest.inputs[0].file not in text
    assert not described.dataset.splits["train"].shards


def make_site(folder: Path, name: str, source: Path) -> Path:
    """A project of its own, with rows of its own."""
    site = folder / name
    (site / "logs").mkdir(parents=True)
    lines = (source / "logs" / "log.jsonl").read_text().splitlines()[:-1]
    own = [line.replace("Where is", f"Where in the {name} is") for line in lines]
    (site / "logs" / "log.jsonl").write_text("\n".join(own) + "\n")
    settings = yaml.safe_load((source / "graft.yaml").read_text())
    (site / "graft.yaml").write_text(yaml.safe_dump({**settings, "project": name}))
    with open_project(site).open() as work:
        run_pipeline(work, upto="prepare")
    return site


@pytest.mark.slow
def test_two_places_train_in_rounds_through_a_kill_and_no_row_comes_back(
    small_project, tmp_path, monkeypatch
):
    """The real command with real jobs, one over SSH: killed with -9 while they train, then run again."""
    north, south = (make_site(tmp_path, name, small_project) for name in ("north", "south"))
    far = tmp_path / "far"
    settings = yaml.safe_load((small_project / "graft.yaml").read_text())
    settings["train"] |= {
        "epochs": 1,
        "max_rows": 16,
        "validation_rows": 4,
        "checkpoint_every": 1,
        "proximal": 0.1,
    }
    settings["fleet"] = {
        "hosts": {"far": {"address": "127.0.0.1", "python": sys.executable, "folder": str(far)}}
    }
    settings["federated"] = {
        "rounds": 2,
        "places": [
            {"name": "north", "place": "local", "data": str(north)},
            {"name": "south", "place": "ssh:far", "data": str(south)},
        ],
    }
    (small_project / "graft.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "federated", "-C", str(small_project)]
    jobs = [small_project / ".graft" / "fleet" / "local" / "jobs", far / "jobs"]
    with running_sshd(tmp_path) as ssh:
        monkeypatch.setenv("GRAFT_SSH", ssh)
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pause = threading.Event()
        while not list(jobs[0].glob("*/work/run/steps.jsonl")):
            assert first.poll() is None
            pause.wait(0.1)
        first.kill()
        first.wait()
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)["rounds"]

    assert [[place["name"] for place in number["places"]] for number in rounds] == [["north", "south"]] * 2
    assert rounds[-1]["decision"] in ("deploy", "iterate", "abort", "not_enough_evidence")
    # A job for each round: the kill has trained nothing twice.
    assert [len(list(folder.iterdir())) for folder in jobs] == [2, 2]
    for folder in ("runs", "fleet/bundles"):
        assert not list((small_project / ".graft" / folder).rglob("*.parquet"))
    words = [b"Where in the north is", b"Where in the south is"]
    for path in (small_project / ".graft").rglob("*"):
        # What the jobs of the place `local` have is at the place.
        if path.is_file() and jobs[0] not in path.parents:
            content = path.read_bytes()
            assert not any(word in content for word in words), path
