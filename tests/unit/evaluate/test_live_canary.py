"""`graft release promote --canary`: promoted, rolled back or left undecided by live sessions."""

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from registry_samples import PROJECT, alias_move, parts, publish_parts, write_adapter
from typer.testing import CliRunner

from graftwork.cli.release import promote
from graftwork.evaluate.live import canary as canaries
from graftwork.evaluate.live.ab import LiveAnswer
from graftwork.evaluate.live.canary import (
    CanaryRequest,
    CanaryTest,
    decide_canary,
    find_canary,
    parse_share,
    run_canary,
)
from graftwork.evaluate.statistics.anytime import TwoArms
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Busy, NegativeResult, UserError
from graftwork.records.interaction import Capture
from graftwork.registry.project import open_store, promote_release
from graftwork.serve.routing import make_experiment

app = typer.Typer()
app.command("promote")(promote)
SHARE = 0.3


@pytest.fixture
def root(tmp_path):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"metrics": ["json_valid", "token_f1"]},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


@pytest.fixture
def work(root):
    with use_project(open_project(root), NullReporter()) as opened:
        yield opened


@pytest.fixture
def pair(work, root):
    """The live release, and a new one."""
    made = [
        publish_parts(
            folder=open_store(work),
            index=work.releases,
            **parts(write_adapter(root / name, weights=name.encode())),
        ).id
        for name in ("one", "two")
    ]
    work.releases.move_alias(alias_move("champion", made[0]))
    return made


class Endpoint:
    """Serves sessions by the canary that the project states, as the real endpoint does."""

    def __init__(self, work, answer, *, per_look=200):
        self.work, self.answer, self.per_look = work, answer, per_look
        self.count, self.splits = 0, []

    def pause(self, _seconds):
        split = find_canary(self.work)
        self.splits.append(split)
        aliases = self.work.releases.aliases()
        running = make_experiment(split, champion=aliases[split.alias], challenger=aliases[split.challenger])
        new = []
        for _ in range(self.per_look):
            self.count += 1
            arm = running.assign(f"s{self.count}")
            reply, reason = self.answer(arm)
            new.append(
                Capture(
                    id=f"c{self.count}", at="2026-01-01T00:00:00Z", session=f"s{self.count}",
                    model="champion", release=running.release_of(arm),
                    request={"messages": [{"role": "user", "content": "give me JSON"}]},
                    reply=reply, finish_reason=reason, prompt_tokens=1, reply_tokens=1,
                    first_token_ms=None, total_ms=10.0, dealt=running.experiment, arm=arm,
                    share=running.share,
                )
            )  # fmt: skip
        self.work.captures.add(new)


def answers(champion, canary, *, seed=1, failing=0.0):
    chance = random.Random(seed)

    def answer(arm):
        if arm == "challenger" and chance.random() < failing:
            return "", "error"
        rate = champion if arm == "champion" else canary
        return ("{}" if chance.random() < rate else "no JSON"), "stop"

    return answer


def canary(work, pair, answer, **options):
    endpoint = Endpoint(work, answer)
    asked = CanaryRequest(share=SHARE, metric="json_valid", **options)
    return run_canary(work, pair[1], asked, pause=endpoint.pause), endpoint


def test_a_better_release_is_promoted_and_the_report_is_kept(work, pair):
    report, endpoint = canary(work, pair, answers(0.5, 0.9))
    assert (report.decision, report.exit_code) == ("promoted", 0)
    assert work.releases.aliases()["champion"] == pair[1]
    assert work.releases.alias_log("champion")[-1].why == report.reason
    assert endpoint.splits[0].share == SHARE
    assert find_canary(work) is None
    assert json.loads(Path(report.file).read_bytes())["decision"] == "promoted"
    assert report.reason in [note.text for note in work.releases.notes(pair[1])]
    assert report.champion.sessions + report.canary.sessions == endpoint.count
    assert report.difference > 0


def test_a_worse_release_is_rolled_back_and_the_alias_never_moves(work, pair):
    report, _ = canary(work, pair, answers(0.9, 0.5))
    assert (report.decision, report.exit_code) == ("rolled_back", 1)
    assert work.releases.aliases()["champion"] == pair[0]
    assert len(work.releases.alias_log("champion")) == 1
    assert "worse by json_valid" in report.reason


def test_a_release_that_leaves_requests_without_an_answer_is_rolled_back_whatever_its_grades(work, pair):
    report, _ = canary(work, pair, answers(0.0, 0.0, failing=0.3))
    assert report.decision == "rolled_back"
    assert "more failed requests" in report.reason
    assert report.canary.failures > 0


def test_a_metric_promotes_nothing_while_the_evidence_is_that_it_fails_more_requests():
    failures = TwoArms(0.025)
    for _ in range(12):
        failures.update("baseline", successes=1)
        failures.update("candidate", failures=1)
        if failures.log_e_value > 0:
            break
    assert not failures.decided
    assert decide_canary("candidate", failures) == "wait"
    assert decide_canary("candidate", TwoArms(0.025)) == "promote"
    assert decide_canary("baseline", failures) == "roll_back"


def test_a_canary_whose_sessions_are_not_in_the_assigned_shares_ends_and_promotes_nothing(work, pair):
    endpoint = Endpoint(work, answers(0.5, 0.95))
    add = work.captures.add

    def lose_most_of_the_challengers(captures):
        add([capture for capture in captures if capture.arm == "champion" or capture.id.endswith("0")])

    endpoint.work = SimpleNamespace(
        captures=SimpleNamespace(add=lose_most_of_the_challengers), ledger=work.ledger, releases=work.releases
    )
    asked = CanaryRequest(share=SHARE, metric="json_valid")
    report = run_canary(work, pair[1], asked, pause=endpoint.pause)
    assert (report.decision, report.exit_code) == ("undecided", 12)
    assert "sample ratio mismatch" in report.reason
    assert work.releases.aliases()["champion"] == pair[0]


def test_an_equal_release_is_left_undecided_at_the_limit(work, pair):
    report, endpoint = canary(work, pair, answers(0.8, 0.8, seed=3), max_sessions=1000)
    assert (report.decision, report.exit_code) == ("undecided", 12)
    assert endpoint.count == 1000
    assert work.releases.aliases()["champion"] == pair[0]


def test_the_same_command_goes_on_with_the_evidence_collected_before(work, pair):
    first, endpoint = canary(work, pair, answers(0.8, 0.8, seed=3), max_sessions=200)
    again = CanaryRequest(share=SHARE, metric="json_valid", max_sessions=400)
    second = run_canary(work, pair[1], again, pause=endpoint.pause)
    assert second.experiment == first.experiment
    assert second.champion.sessions + second.canary.sessions == 400


def test_a_canary_that_nobody_watches_ends_by_itself(work, pair):
    now = [1000.0]

    def stop(_seconds):
        assert find_canary(work, clock=lambda: now[0]) is not None
        assert find_canary(work, clock=lambda: now[0] + 3600) is None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_canary(work, pair[1], CanaryRequest(share=0.05), pause=stop, clock=lambda: now[0])
    assert find_canary(work, clock=lambda: now[0]) is None


def test_an_alias_that_moves_meanwhile_ends_the_canary_undecided_and_stays_where_it_is(work, pair, root):
    third = publish_parts(
        folder=open_store(work), index=work.releases, **parts(write_adapter(root / "three", weights=b"three"))
    ).id
    endpoint = Endpoint(work, answers(0.2, 0.95), per_look=400)

    def pause(seconds):
        endpoint.pause(seconds)  # enough to promote
        work.releases.move_alias(alias_move("champion", third, previous=pair[0]))

    report = run_canary(work, pair[1], CanaryRequest(share=SHARE, metric="json_valid"), pause=pause)
    assert (report.decision, report.exit_code) == ("undecided", 12)
    assert f"now points at {third[:12]}" in report.reason
    assert work.releases.aliases()["champion"] == third


def test_a_second_canary_of_the_same_alias_is_refused_and_the_first_goes_on(work, pair):
    def pause(_seconds):
        before = find_canary(work)
        with pytest.raises(Busy, match="already runs"):
            run_canary(work, pair[1], CanaryRequest(share=0.5))
        assert find_canary(work) == before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_canary(work, pair[1], CanaryRequest(share=SHARE), pause=pause)
    assert find_canary(work) is None


def test_of_two_canaries_that_begin_at_once_one_is_refused(work, pair, monkeypatch):
    """The second begins when the first has found the alias free, and before endpoints know of it."""
    refused = []

    def begin_another(*args, **options):
        monkeypatch.setattr(canaries, "promote_release", promote_release)
        with pytest.raises(Busy, match="already runs"):
            run_canary(work, pair[1], CanaryRequest(share=0.5, max_seconds=0))
        refused.append(find_canary(work))
        return promote_release(*args, **options)

    monkeypatch.setattr(canaries, "promote_release", begin_another)
    asked = CanaryRequest(share=SHARE, max_seconds=0)
    assert run_canary(work, pair[1], asked).decision == "undecided"
    # No session goes to the old release of the alias `canary`.
    assert refused == [None]
    assert find_canary(work) is None


def test_a_canary_that_was_silent_for_too_long_leaves_the_one_that_took_its_place(work, pair):
    now, pauses = [1000.0], iter([1])

    def begin_another(_seconds):
        next(pauses)
        now[0] += 3600.0
        output = {"alias": "champion", "canary": "canary", "share": 0.7, "until": now[0] + 60}
        work.ledger.put("canary/champion", fingerprint="2030", output=output, finished_at="", seconds=0.0)

    asked = CanaryRequest(share=SHARE)
    with pytest.raises(Busy, match="another canary took its place"):
        run_canary(work, pair[1], asked, pause=begin_another, clock=lambda: now[0])
    assert find_canary(work, clock=lambda: now[0]).share == 0.7


def test_an_alias_that_moves_after_the_last_look_stays_where_it_is(work, pair, root, monkeypatch):
    third = publish_parts(
        folder=open_store(work), index=work.releases, **parts(write_adapter(root / "three", weights=b"three"))
    ).id

    def move_then_promote(*args, **options):
        if options["alias"] != "canary":
            work.releases.move_alias(alias_move("champion", third, previous=pair[0]))
        return promote_release(*args, **options)

    monkeypatch.setattr(canaries, "promote_release", move_then_promote)
    report, _ = canary(work, pair, answers(0.2, 0.95))
    assert (report.decision, work.releases.aliases()["champion"]) == ("undecided", third)
    assert f"now points at {third[:12]}" in report.reason


def test_canaries_of_other_aliases_keep_their_entries(work, pair):
    def put(entry, alias, began=""):
        output = {"alias": alias, "canary": f"{alias}-new", "share": 0.1, "until": 2e9}
        work.ledger.put(entry, fingerprint=began, output=output, finished_at="", seconds=0.0)

    put("canary/people/champion", "people/champion", began="2026-01-01T00:00:00Z")
    run_canary(work, pair[1], CanaryRequest(share=SHARE, max_seconds=0), clock=lambda: 1e9)
    assert find_canary(work, clock=lambda: 1e9).alias == "people/champion"


def test_what_cannot_be_a_canary_is_refused_by_name(work, pair):
    with pytest.raises(UserError, match="already points at"):
        run_canary(work, pair[0], CanaryRequest(share=0.1))
    with pytest.raises(UserError, match="points at no release yet"):
        run_canary(work, pair[1], CanaryRequest(share=0.1, alias="staging"))
    with pytest.raises(UserError, match="not graded"):
        run_canary(work, pair[1], CanaryRequest(share=0.1, metric="nonsense"))


def test_a_release_that_the_gate_refused_needs_force_for_a_canary_too(work, pair, root, monkeypatch):
    refused = publish_parts(
        folder=open_store(work),
        index=work.releases,
        **parts(write_adapter(root / "three", weights=b"three"), decision="abort"),
    )
    with pytest.raises(NegativeResult):
        run_canary(work, refused.id, CanaryRequest(share=0.1))
    assert find_canary(work) is None


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125)])
def test_a_share_is_a_percentage_or_a_fraction(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0%", "100%", "1", "five", "-5%", "", "5%%"])
def test_a_share_of_none_all_or_nonsense_is_refused(text):
    with pytest.raises(UserError, match="not a share"):
        parse_share(text)


def test_the_command_prints_its_report_and_exits_by_the_decision(work, pair, root, monkeypatch):
    endpoint = Endpoint(work, answers(0.9, 0.4))
    watch = partial(run_canary, pause=endpoint.pause)
    monkeypatch.setattr("graftwork.evaluate.live.canary.run_canary", watch)
    words = [pair[1], "--canary", "30%", "--metric", "json_valid", "-C", str(root)]
    made = CliRunner().invoke(app, [*words, "--json"])
    assert made.exit_code == 1, made.output
    assert json.loads(made.stdout)["decision"] == "rolled_back"
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 1
    assert "ROLLED BACK" in made.stdout
    made = CliRunner().invoke(app, [pair[1], "--hours", "1", "-C", str(root)])
    assert made.exit_code == 2


def test_simulated_canaries_are_decided_rightly():
    """A canary that is worse is rolled back, in a small simulation."""
    rightly = {"roll_back": 0, "promote": 0}
    wrongly = 0
    for seed in range(10):
        for expected, rate in (("roll_back", 0.55), ("promote", 0.95), ("wait", 0.8)):
            chance, test = random.Random(seed), CanaryTest()
            for n in range(3000):
                arm = "B" if chance.random() < 0.2 else "A"
                good = chance.random() < (rate if arm == "B" else 0.8)
                if test.take(LiveAnswer(arm, str(n), float(good)), failed=False) != "wait":
                    break
            if test.step == expected:
                rightly[expected] = rightly.get(expected, 0) + 1
            elif test.step != "wait":
                wrongly += 1
    assert rightly["roll_back"] >= 9
    assert rightly["promote"] >= 9
    assert wrongly <= 1
