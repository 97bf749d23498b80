"""Places of providers from the command line: planned for their machines, chosen, resumed elsewhere."""

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from flows import opened

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from cloud_cases import open_case
from cloud_server import has_checkpoint
from fleet_simulator import SimulatedProvider

from graftwork.cli.main import app
from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import FleetRequest, follow, start_run
from graftwork.fleet.plans import PlacePlanner, adopt_plan
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.pipeline.table import run_pipeline
from graftwork.records.errors import NegativeResult
from graftwork.records.hardware import Offer
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome


def graft(*words):
    app([*words], standalone_mode=False)


@pytest.fixture
def kaggle(tmp_path, monkeypatch):
    with open_case("kaggle", SimulatedProvider(jobs_only=True), tmp_path, monkeypatch) as case:
        yield case


def offer(gpu, **terms):
    return Offer(place="runpod", gpu=gpu, source="a list", dated="2026-11-01", **terms)


def test_offers_are_planned_for_the_machines_of_the_place_and_auto_takes_the_cheapest(
    small_project, change_settings, kaggle, capsys
):
    change_settings(small_project, fleet={"kaggle": {}})
    graft("fleet", "offers", "--run", "-C", str(small_project), "--json")
    found = json.loads(capsys.readouterr().out)
    quotes = {(quote["place"], quote["gpu"]): quote for quote in found["quotes"]}
    card, here = quotes["kaggle", "RTX 4090"], quotes["local", ""]
    assert card["device"] == "RTX 4090"
    assert here["device"] != card["device"]
    assert card["quota_hours"] == 30.0
    assert card["price_source"] == "Kaggle's quota"
    with pytest.raises(NegativeResult, match="no place finishes"):
        graft("fleet", "run", "--place", "auto", "--deadline", "0.0001m", "-C", str(small_project))
    assert kaggle.provider.machines == []


def test_a_card_has_a_plan_of_its_own_which_the_project_adopts_once_it_is_trained(small_project, listener):
    with opened(small_project, listener) as work:
        made = run_pipeline(work, upto="plan")
        planner = PlacePlanner(work, made)
        plan = planner.plan(offer("RTX 4090"))
        assert (plan.device.kind, plan.device.name) == ("cuda", "RTX 4090")
        assert plan.dtype == "bfloat16"
        assert planner.plan(offer("")) is made.get("plan", Plan)
        # Once it is trained there, it is the run of this project.
        assert run_id_of(plan) != run_id_of(made.get("plan", Plan))
        adopt_plan(work, plan)
        assert run_id_of(run_pipeline(work, upto="plan").get("plan", Plan)) == run_id_of(plan)


@pytest.mark.slow
def test_a_run_starts_at_kaggle_is_killed_there_and_ends_here_with_the_same_bytes(
    small_project, listener, change_settings, tmp_path, kaggle
):
    change_settings(small_project, train={"epochs": 4, "checkpoint_every": 5, "validation_rows": 2})
    other = tmp_path / "other"
    shutil.copytree(small_project, other)
    with opened(small_project, listener) as work:
        whole = run_pipeline(work, upto="train").get("train", TrainOutcome)
    change_settings(other, fleet={"kaggle": {"accelerator": ""}})
    with opened(other, listener) as work:
        job = start_run(work, FleetRequest("kaggle"), confirm=lambda _quote: True)
        kaggle.provider.advance(120)
        kaggle.api.start(job.label)
        pause = threading.Event()
        while not has_checkpoint(kaggle.api.root):
            assert kaggle.api.processes[job.label].poll() is None, kaggle.api.output(job.label)
            pause.wait(0.1)
        kaggle.api.processes[job.label].kill()
        kaggle.api.finish(job.label)
        ended = follow(work, job, poll_seconds=0.2)
        assert ended.state == "failed"
        assert ended.fetched
        assert list((work.project.runs / job.run_id / "checkpoints").glob("step-*"))
        here = run_pipeline(work, upto="train").get("train", TrainOutcome)
        assert here.adapter_hash == whole.adapter_hash
        assert fleet_jobs.reconcile(work).open == 0
