"""Reinforcement learning between the stages: the rows that a plan counts."""

from types import SimpleNamespace

import pytest

from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.train.rollouts.project import (
    REWARD_SECONDS,
    find_reward_seconds,
    keep_reward_seconds,
    lay_out_rows,
)
from graftwork.train.settings import TrainSettings


def row(name: str, length: int) -> Row:
    return Row(
        id=name,
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="q"),),
        reply="a",
        tokens=tuple(range(length)),
        trained_from=1,
    )


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
        mix={"rl": 0.7, "sft": 0.3},
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
