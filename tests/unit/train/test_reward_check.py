"""Whether rewards can be trusted, and the rows of rollouts that a plan counts."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample_rows import make_row

from graftwork import open_project
from graftwork.grading.rewards import AnswerVerdict, RewardQuestion, RewardRunner
from graftwork.pipeline.preflight import GOLD, check_rewards, judge, project_prompts, require_sound, spread
from graftwork.pipeline.table import run_pipeline
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentFailure, NegativeResult, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train.rollouts.project import (
    REWARD_SECONDS,
    find_reward_seconds,
    keep_reward_seconds,
    lay_out_rows,
    make_reward_spec,
)
from graftwork.train.settings import TrainSettings

EXAMPLE = Path(__file__).parents[3] / "examples" / "small_functions"

CASE = Case(
    id="a", origin=Origin(file="f", line=1), messages=(Message(role="user", content="q"),), reference="right"
)


def judged(**rewards):
    asked = [(CASE, name, name) for name in rewards]
    graded = [
        AnswerVerdict(key=name, reward=reward, parts={"m": reward}, seconds=0.1)
        for name, reward in rewards.items()
    ]
    return judge(asked, graded, cases=1)


def test_rewards_hold_if_only_the_gold_answer_gets_something():
    found = judged(**{GOLD: 1.0, "empty": 0.0, "long": 0.2, "ok": None})
    assert found.sound
    require_sound(found)


def test_a_rewarded_hack_is_named():
    found = judged(**{GOLD: 0.8, "empty": 0.4, "long": 0.3})
    assert [item.name for item in found.rewarded] == ["empty"]
    with pytest.raises(NegativeResult, match="cannot be trusted") as refused:
        require_sound(found)
    assert "empty" in refused.value.why


@pytest.mark.parametrize(("gold", "why"), [(0.1, "reference itself"), (None, "no reward applies")])
def test_a_gold_answer_without_a_reward_is_refused(gold, why):
    with pytest.raises(NegativeResult) as refused:
        require_sound(judged(**{GOLD: gold, "empty": 0.0}))
    assert why in refused.value.why


def test_a_reward_that_cannot_grade_is_named_once_with_its_reason():
    asked = [(CASE, name, name) for name in (GOLD, "empty", "long")]
    graded = [
        AnswerVerdict(key="0", reward=None, failed={"own.py:f": "it returned nan"}, seconds=0.1)
        for _ in asked
    ]
    found = judge(asked, graded, cases=1)
    assert [[answer.name for answer in answers].count(GOLD) for answers in found.failures.values()] == [1]
    assert [len(answers) for answers in found.failures.values()] == [3]
    with pytest.raises(NegativeResult) as refused:
        require_sound(found)
    assert refused.value.why == "own.py:f cannot grade the reference: it returned nan"


def test_prompts_without_a_reference_are_named():
    with pytest.raises(NegativeResult) as refused:
        require_sound(judged(empty=0.0))
    assert "no prompt has a reference" in refused.value.why


def test_cases_are_spread_over_the_list():
    cases = [CASE.model_copy(update={"id": str(number)}) for number in range(10)]
    assert [case.id for case in spread(cases, 3)] == ["0", "3", "6"]
    assert len(spread(cases, 20)) == 10


def test_rewards_of_another_model_are_pointed_out(tmp_path):
    (tmp_path / "graft.yaml").write_text(
        "project: p\ndata: {logs: [log.jsonl]}\nmodels:\n  taught: {}\n"
        "  rewarded: {train: {objective: grpo, rewards: [{metric: task_success}]}}\n"
    )
    with open_project(tmp_path).open() as work, pytest.raises(UserError, match="taught has no rewards") as no:
        check_rewards(work)
    assert no.value.fix == "--model rewarded"


def test_the_prompts_are_those_of_the_model_that_was_asked_for(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{role} question number {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ],
            "role": role,
        }
        for role in ("support", "code")
        for number in range(3)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "graft.yaml").write_text(
        "project: p\ndata: {logs: [log.jsonl], test: 0, validation: 0, near_duplicate: 1.0}\n"
        "train: {objective: grpo, rewards: [{metric: exact}], rollouts: {source: train}}\n"
        "models:\n  support: {keep: {role: [support]}}\n  code: {keep: {role: [code]}}\n"
    )
    with open_project(tmp_path).open() as work:
        run_pipeline(work, upto="prepare")
        for name in ("support", "code"):
            asked = project_prompts(replace(work, asked_model=name))
            assert {case.messages[-1].content.split()[0] for case in asked} == {name}


def test_the_example_rewards_right_functions_and_no_others_under_a_private_umask(tmp_path):
    before = os.umask(0o077)
    try:
        shutil.copytree(EXAMPLE, tmp_path / "p", ignore=shutil.ignore_patterns(".graft"))
        with open_project(tmp_path / "p").open() as opened:
            work = replace(opened, asked_model="rewarded")
            spec = make_reward_spec(work, folder=work.project.root)
            cases = spread(project_prompts(work), 2)
        texts = [(case, text) for case in cases for text in (case.reference, "def f(): pass")]
        with RewardRunner(spec, processes=1) as runner:
            graded = runner.grade_all(RewardQuestion("a", case, text) for case, text in texts)
            assert [parts.reward for parts in graded] == [1.0, 0.0, 1.0, 0.0]
    except EnvironmentFailure:
        pytest.skip("no way to shut code in works here")
    finally:
        os.umask(before)


def row(name: str, length: int) -> Row:
    return make_row(name, range(length), 1)


def settings(**changes) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "objective": "grpo",
            "rewards": [{"metric": "task_success"}],
            "rollouts": {"steps": 3, "prompts": 2, "num_generations": 4},
            "batch_size": 5,
            **changes,
        }
    )


def test_a_plan_counts_every_answer_of_every_step():
    rows, stepped, load = lay_out_rows([row("a", 9), row("b", 7)], [], settings())
    assert len(rows) == 3 * 2 * 4
    assert (stepped.batch_size, stepped.epochs) == (8, 1)
    assert (load.rows, load.batches, load.supervised_rows) == (8, 3, 0)


def test_a_plan_knows_the_longest_prompt_and_who_answers():
    short, long = row("a", 9), row("b", 7).model_copy(update={"trained_from": 5})
    *_, load = lay_out_rows([short, long], [], settings())
    assert (load.prompt_tokens, load.longest, load.has_turns, load.on_server) == (3.0, 5, False, False)
    elsewhere = {"endpoint": {"url": "http://127.0.0.1:8000/v1", "model": "base"}}
    *_, load = lay_out_rows([short], [], settings(rollouts=elsewhere))
    assert load.on_server
    *_, load = lay_out_rows([short], [], settings(rollouts={"environment": {"python": "envs/e.py:Game"}}))
    assert load.has_turns


@pytest.mark.parametrize("updates", [1, 2])
def test_a_plan_of_a_mix_counts_its_supervised_rows(updates):
    mixed = settings(
        mix={"sft": 0.3},
        rollouts={"steps": 3, "prompts": 2, "num_generations": 4, "updates": updates},
    )
    rows, stepped, load = lay_out_rows([row("a", 9)], [row("s", 20), row("t", 30)], mixed)
    assert sum(found.id in ("s", "t") for found in rows) == 3 * updates * 5
    assert stepped.batch_size == 8 + 5
    assert load.supervised_rows == 5


def test_a_plan_counts_rewards_once_they_were_measured(monkeypatch):
    monkeypatch.setattr("graftwork.train.rollouts.project.count_cores", lambda: 2)
    *_, load = lay_out_rows([row("a", 9)], [], settings(), reward_seconds=0.5)
    assert load.reward_seconds == 0.25
    audited = settings(reward_checks={"audit_share": 0.5})
    *_, load = lay_out_rows([row("a", 9)], [], audited, reward_seconds=0.5)
    assert load.reward_seconds == 0.5


def test_measured_seconds_belong_to_their_rewards(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.train.rollouts.project._reward_key", lambda work: work.key)
    work = SimpleNamespace(project=SimpleNamespace(state=tmp_path), key="one")
    assert find_reward_seconds(work) == 0
    keep_reward_seconds(work, 0.5)
    keep_reward_seconds(SimpleNamespace(**{**vars(work), "key": "other"}), 2.0)
    assert find_reward_seconds(work) == 0.5
    (tmp_path / REWARD_SECONDS).write_text("torn")
    assert find_reward_seconds(work) == 0
