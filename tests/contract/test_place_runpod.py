"""RunPod's REST v2 against a strict stand-in: pods are made once, delivered to over SSH, and given back."""

import re
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from runpod_server import CARD, KEY, problems, running_runpod
from ssh_server import running_sshd

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_drill import MemoryLedger
from fleet_samples import trial_bundle
from fleet_simulator import SimulatedProvider
from place_contract import PAUSE

from graftwork.fleet.control import Controller, Safety
from graftwork.fleet.place import PlaceUnreachable, Refused, make_label
from graftwork.fleet.places.runpod import RunPodClient, RunPodPlace, RunPodSettings
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.fleet import JobOrder

SECRET = "hf_s3cr3tvalue"
SAFETY = Safety(boot_seconds=600, reconcile_seconds=300, settle_seconds=240)
CAPS = CapSettings(job_usd=5, month_usd=50)


class Certain(Random):
    def random(self):
        return 0.99


@pytest.fixture
def provider():
    return SimulatedProvider(chance=Certain(1))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    key = tmp_path / "key.pub"
    key.write_text("ssh-ed25519 AAAA me@here\n")
    monkeypatch.setattr(RunPodPlace, "folder", str(tmp_path / "pod"))
    return RunPodSettings(public_key=str(key), python=sys.executable)


def make_place(url, settings, tmp_path, key=KEY):
    client = RunPodClient(key, base_url=url, wait=lambda _seconds: None)
    return RunPodPlace(settings, state=tmp_path / "state", client=client)


def make_order(ledger, bundle="", number=1):
    job_id = f"{number:012x}"
    label = make_label(ledger.key, job_id)
    values = {"run_id": "run1", "bundle": str(bundle), "seconds": 3600.0, "usd_per_hour": 0.4}
    return JobOrder(job_id=job_id, label=label, gpu=CARD, **values)


def test_offers_are_the_catalog_with_todays_prices(provider, settings, tmp_path):
    with running_runpod(provider) as (_, url):
        (offer,) = make_place(url, settings, tmp_path).offer()
    assert (offer.gpu, offer.usd_per_hour, offer.source) == (CARD, 0.4, "RunPod's catalog")


def test_the_stand_in_refuses_what_runpod_refuses(settings, tmp_path):
    body = make_place("http://unused", settings, tmp_path).request_of(make_order(MemoryLedger()))
    assert problems(body) == []
    assert re.fullmatch(
        r"bash -c '\(sleep 5400; runpodctl remove pod \$RUNPOD_POD_ID\) & exec /start.sh'", body["args"]
    )
    assert problems({**body, "gpuTypeIds": [CARD]})
    assert problems({**body, "cpu": {"id": "cpu3c"}})
    assert problems({**body, "disk": "40"})
    assert problems({key: value for key, value in body.items() if key != "name"})


def test_a_pod_is_made_delivered_to_collected_from_and_given_back(provider, settings, tmp_path, monkeypatch):
    bundle, _ = trial_bundle(tmp_path)
    with running_sshd(tmp_path) as command:
        port = int(re.search(r"-p (\d+)", command)[1])
        monkeypatch.setenv("GRAFT_SSH", command.partition(" -o UserKnown")[0])
        with running_runpod(provider, ssh_port=port) as (api, url):
            place, ledger = make_place(url, settings, tmp_path), MemoryLedger()
            ordered = make_order(ledger, bundle)
            controller = Controller(place, ledger, SAFETY)
            controller.deliver = lambda job: place.deliver(ordered, job.placed, secrets={"HF_TOKEN": SECRET})
            controller.collect = lambda job: place.fetch(job.placed, tmp_path / "run")
            job = controller.start(ordered, caps=CAPS, now=provider.now, secrets={"HF_TOKEN": SECRET})
            assert place.poll(job.placed).phase == "starting"
            assert place.submit(ordered, secrets={}) == job.placed
            provider.advance(120)
            while ledger.get(job.id).state == "submitted":
                controller.reconcile(now=provider.now)
                PAUSE.wait(0.2)
            assert ledger.get(job.id).fetched, place.log(job.placed)
            assert (tmp_path / "run" / "adapter" / "trial.txt").exists()
            for _ in range(3):
                provider.advance(SAFETY.settle_seconds)
                controller.reconcile(now=provider.now)
            assert ledger.get(job.id).state == "done"
            assert (provider.alive(), place.list()) == ((), ())
            assert place.poll(job.placed).phase == "gone"
    assert api.requests["POST /v2/pods"] == 1
    assert not any(SECRET.encode() in raw for raw in api.raw)


def test_a_pod_that_was_made_although_the_request_failed_is_found_and_ended(provider, settings, tmp_path):
    provider.faults = Counter({"create after the timeout": 1, "duplicate": 1, "never boots": 2})
    with running_runpod(provider) as (api, url):
        ledger = MemoryLedger()
        controller = Controller(make_place(url, settings, tmp_path), ledger, SAFETY)
        with pytest.raises(PlaceUnreachable, match="status 504"):
            controller.start(make_order(ledger), caps=CAPS, now=provider.now)
        for _ in range(12):
            provider.advance(SAFETY.reconcile_seconds)
            controller.reconcile(now=provider.now)
    (job,) = ledger.list()
    assert (job.state, job.reason) == ("failed", "the machine never came up")
    assert (len(provider.machines), provider.alive()) == (2, ())
    assert api.requests["POST /v2/pods"] == 1
    assert provider.billed_usd() <= job.actual_usd <= job.committed_usd


def test_busy_and_broken_answers_are_retried_except_for_a_creation(provider, settings, tmp_path):
    provider.faults = Counter({"server error": 1, "throttled": 1})
    with running_runpod(provider) as (api, url):
        place = make_place(url, settings, tmp_path)
        assert place.list() == ()
        assert api.requests["GET /v2/pods"] == 3
        provider.faults = Counter({"server error": 9})
        with pytest.raises(PlaceUnreachable, match="status 500"):
            place.list()
        provider.faults = Counter({"quota": 1})
        with pytest.raises(Refused, match="quota is used up"):
            place.submit(make_order(MemoryLedger()), secrets={})


def test_wrong_credentials_and_keys_are_explained_before_a_pod_is_made(
    provider, settings, tmp_path, monkeypatch
):
    with running_runpod(provider) as (_, url):
        with pytest.raises(Refused, match="rejected the key") as caught:
            make_place(url, settings, tmp_path, key="wrong").offer()
        assert "RUNPOD_API_KEY" in caught.value.fix
        absent = settings.model_copy(update={"public_key": str(tmp_path / "none.pub")})
        with pytest.raises(UserError, match="no public SSH key"):
            make_place(url, absent, tmp_path).submit(make_order(MemoryLedger()), secrets={})
        (tmp_path / "private").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
        private = settings.model_copy(update={"public_key": str(tmp_path / "private")})
        with pytest.raises(UserError, match="this is not a public"):
            make_place(url, private, tmp_path).submit(make_order(MemoryLedger()), secrets={})
    assert provider.machines == []
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    with pytest.raises(EnvironmentFailure, match="no key for RunPod"):
        RunPodPlace(settings, state=tmp_path).offer()
