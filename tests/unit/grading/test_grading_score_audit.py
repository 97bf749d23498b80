"""Logged scores are audited: constant ones, those by chance and those against the status are found."""

import json
import random

import pytest
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.grading.reward_audit import ScoredReply, audit_scores, require_usable
from graftwork.records.errors import NegativeResult

WORDS = ["the", "a", "report", "line", "table", "code", "because", "item", "short", "long", "fine", "test"]


def make_replies(score, *, count=120, seed=3, status=False):
    chance = random.Random(seed)
    found = []
    for number in range(count):
        text = " ".join(chance.choices(WORDS, k=chance.randint(4, 60)))
        failed = number % 4 == 0 if status else None
        found.append(ScoredReply(score(text, failed, chance), f"question {number}", text, failed))
    return found


def kinds(replies):
    return [finding.kind for finding in audit_scores(replies).findings]


def test_a_constant_score_is_found():
    assert kinds(make_replies(lambda *_: 0.8)) == ["constant"]


def test_replies_that_are_nested_too_deeply_are_audited_as_text():
    replies = [*make_replies(lambda *_: 0.8), ScoredReply(0.8, "question", "[" * 200_000, None)]
    assert kinds(replies) == ["constant"]


@pytest.mark.parametrize("seed", range(4))
def test_a_score_by_chance_does_not_depend_on_the_reply(seed):
    assert kinds(make_replies(lambda _t, _f, chance: chance.uniform(0.87, 1.0), seed=seed)) == ["independent"]


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_score_that_depends_on_the_reply_is_usable(seed):
    def score(text, _failed, chance):
        return 0.5 * ("because" in text) + chance.uniform(0, 0.8)

    found = audit_scores(make_replies(score, seed=seed, count=200))
    assert found.usable
    assert found.reply_p < 0.05


def test_a_score_that_is_higher_for_failed_replies_contradicts_the_status():
    def score(text, failed, _chance):
        return len(text) / 400 + 0.3 * bool(failed)

    assert kinds(make_replies(score, status=True)) == ["contradicts_status"]


def test_a_score_that_is_lower_for_failed_replies_is_usable():
    found = audit_scores(
        make_replies(lambda text, failed, _: len(text) / 400 + 0.5 * (not failed), status=True)
    )
    assert found.usable
    assert found.status_p < 0.05


def test_few_scores_are_refused():
    found = audit_scores(make_replies(lambda text, *_: len(text), count=7))
    assert [finding.kind for finding in found.findings] == ["few"]
    with pytest.raises(NegativeResult, match="cannot serve as rewards"):
        require_usable(found)


def test_graft_reward_audit_reads_logs_and_says_what_is_wrong(tmp_path):
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": "a" * (n + 1)},
            ],
            "reward": 0.9,
        }
        for n in range(40)
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    done = CliRunner().invoke(app, ["data", "audit", "--scores", str(path), "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert not found["usable"]
    assert found["whole"]["findings"][0]["kind"] == "constant"
    shown = CliRunner().invoke(app, ["data", "audit", "--scores", str(path)])
    assert "cannot serve as rewards" in shown.output
