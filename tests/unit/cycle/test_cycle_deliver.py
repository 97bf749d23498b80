"""Delivering a release: after a failure every serving machine has the champion, also on a second attempt."""

import pytest
import yaml
from registry_samples import PROJECT, dataset, parts, publish_parts, write_adapter

from graftwork.cycle import runner
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.pipeline.step import StepOutputs
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import EnvironmentFailure, WorkerFailed
from graftwork.registry.deploy import Deployed
from graftwork.registry.project import open_store, promote_release, rollback_alias
from graftwork.store.releases import ReleaseTable

GPU1, GPU2 = "gpu1:/srv", "gpu2:/srv"


class Machines:
    """What each serving machine serves; some cannot be reached, some cannot answer with a release."""

    def __init__(self):
        self.serving, self.unreachable, self.refused = {}, set(), set()

    def deploy(self, _work, name, *, to, **_options):
        if (to, name) in self.unreachable:
            raise EnvironmentFailure(f"{to} cannot be reached")
        ok = (to, name) not in self.refused
        previous = self.serving.get(to)
        if ok:
            self.serving[to] = name
        why = "" if ok else "status 500"
        return Deployed(release=name, alias="champion", to=to, previous=previous, ok=ok, asked=1, why=why)


@pytest.fixture
def machines(monkeypatch):
    made = Machines()
    monkeypatch.setattr(runner, "deploy", made.deploy)
    return made


@pytest.fixture
def work(tmp_path):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "cycle": {"deliver": [{"to": GPU1}, {"to": GPU2}]},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


def make(work, number, parent=None):
    adapter = write_adapter(work.project.root / "made" / str(number), weights=b"%d" % number)
    whole = {**parts(adapter), "dataset": dataset(), "parent": parent}
    release = publish_parts(folder=open_store(work), index=work.releases, **whole)
    promote_release(work, release.id, reason="a test")
    return release


def deliver(work, release):
    return runner.deliver(work, None, release, StepOutputs({})).summary


def test_a_delivery_done_again_leaves_no_machine_on_the_release_that_was_rolled_back(work, machines):
    old = make(work, 1)
    new = make(work, 2, parent=old.id)
    machines.serving = {GPU1: old.id, GPU2: old.id}
    machines.refused, machines.unreachable = {(GPU2, new.id)}, {(GPU1, old.id)}
    with pytest.raises(WorkerFailed, match="not every serving machine"):
        deliver(work, new)
    assert (work.releases.aliases()["champion"], machines.serving[GPU1]) == (old.id, new.id)

    machines.unreachable = set()
    assert deliver(work, new)["action"] == "rolled_back"
    assert machines.serving == {GPU1: old.id, GPU2: old.id}


def test_a_machine_that_cannot_answer_with_the_old_release_fails_the_step(work, machines):
    old = make(work, 1)
    new = make(work, 2, parent=old.id)
    machines.refused = {(GPU2, new.id), (GPU1, old.id)}
    with pytest.raises(WorkerFailed) as failed:
        deliver(work, new)
    assert failed.value.why == f"{GPU1}: status 500"


def test_a_release_goes_to_every_machine(work, machines):
    new = make(work, 1)
    assert deliver(work, new) == {"action": "delivered", "release": new.id, "to": [GPU1, GPU2]}
    assert machines.serving == {GPU1: new.id, GPU2: new.id}


def test_going_back_leaves_a_release_that_a_person_promoted_meanwhile(work, machines, monkeypatch):
    old = make(work, 1)
    other = make(work, 3)
    new = make(work, 2, parent=old.id)
    machines.refused = {(GPU2, new.id)}
    read, reads = ReleaseTable.aliases, []

    def promote_after_reading(table):
        """The second look is that of the way back; then the alias moves."""
        found = read(table)
        reads.append(found)
        if len(reads) == 2:
            promote_release(work, other.id, reason="a person")
        return found

    monkeypatch.setattr(ReleaseTable, "aliases", promote_after_reading)
    assert deliver(work, new)["action"] == "rolled_back"
    assert work.releases.aliases()["champion"] == other.id
    assert machines.serving[GPU1] == other.id


def cycle_at_promote(number=1, verdict=""):
    steps = (
        CycleStepState(name="canary", status="done", summary={"verdict": verdict} if verdict else {}),
        CycleStepState(name="promote", status="running", token=1),
    )
    return CycleState(number=number, model="main", cause="x", version="", started_at=0.0, steps=steps)


def test_a_promotion_done_again_does_not_undo_a_rollback(work):
    """A coordinator died after it had promoted, and a person rolled the release back before the next one."""
    old, new = make(work, 1), make(work, 2)
    rollback_alias(work, reason="a test")
    cycle = cycle_at_promote(number=3)
    assert runner.promote_or_roll_back(work, cycle, new).summary["action"] == "promoted"
    rollback_alias(work, reason="it answers nonsense")
    done = runner.promote_or_roll_back(work, cycle, new).summary
    assert (done["action"], work.releases.aliases()["champion"]) == ("rolled_back", old.id)
    assert "it answers nonsense" in done["why"]
    # The next cycle may decide for it again.
    done = runner.promote_or_roll_back(work, cycle_at_promote(number=4), new).summary
    assert (done["action"], work.releases.aliases()["champion"]) == ("promoted", new.id)
