"""Reinforcement learning through the real worker: it learns, and kills anywhere change nothing."""

from pathlib import Path

import pytest
import torch
from test_train_methods import Killed, make_job, train

from graftwork.files.disk import Journal
from graftwork.grading.reward_runner import GradedParts
from graftwork.grading.reward_worker import make_context
from graftwork.grading.rewards import grade_part
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.train import worker
from graftwork.train.rollouts.episodes import AnswerVerdict, EpisodeJournal, SampledAnswer
from graftwork.train.rollouts.groups import (
    PromptRecord,
    choose_prompts,
    group_advantages,
    is_dead,
    pass_rates,
)
from graftwork.train.rollouts.source import measure_groups
from graftwork.train.run_folder import read_steps

REWARD = """
import json

def likes_e(case, text):
    return min(text.count("e") / 8, 1.0)

def breaks(case, text, evidence):
    seed = sum(map(ord, text)) % 4
    if seed == 0:
        return float("nan")
    if seed == 1:
        return "good"
    if seed == 2:
        raise ValueError("no such luck")
    return 0.5 if len(text) % 2 else 0.25

"""


WHOLE = []
"""The run that nobody killed, made once: its outcome and its steps."""


def make_cases(count=6):
    return [
        Case(
            id=f"case{number}",
            origin=Origin(file="cases.jsonl", line=number + 1),
            messages=(Message(role="user", content=f"Write {number} words."),),
            reference="eeee",
        )
        for number in range(count)
    ]


def make_grpo_job(base, folder, *, reward="likes_e", seconds=5.0, **changes):
    project = folder.parent / "project"
    (project / "rewards").mkdir(parents=True, exist_ok=True)
    (project / "rewards" / "own.py").write_text(REWARD)
    metric = f"rewards/own.py:{reward}"
    settings = {
        "objective": "grpo",
        "learning_rate": 2e-2,
        "rewards": [{"metric": metric}],
        "rollouts": {"steps": 4, "prompts": 2, "answers": 4, "max_tokens": 6},
        "reward_checks": {"preflight": False, "hacks": False, "canaries": 0, "seconds": seconds},
        "checkpoint_every": 2,
        **changes,
    }
    job = make_job(base, folder, method="lora", **settings)
    # A random model never ends its answers by itself.
    spec = {"parts": [{"metric": metric}], "seconds": seconds, "folder": "", "fail_truncated": False}
    named = job.plan.model_copy(update={"train": {**job.plan.train, "rewards": spec}})
    return job.model_copy(update={"plan": named, "project_folder": str(project)})


@pytest.fixture(autouse=True)
def _settled():
    yield
    torch.use_deterministic_algorithms(False)


class LocalGrader:
    """Grades in this process: starting children takes longer than these runs."""

    def __init__(self, spec):
        self._spec = spec
        self._context = make_context(spec)

    def grade_all(self, questions):
        for question in questions:
            (metric,) = [part.metric for part in self._spec.parts]
            grade = grade_part(metric, question.case, question.text, context=self._context, evidence={})
            yield GradedParts(question.key, grade, {metric: grade}, {}, 0.0)

    def close(self):
        pass


@pytest.fixture
def local_grader(monkeypatch):
    monkeypatch.setattr("graftwork.grading.reward_runner.RewardRunner", LocalGrader)


@pytest.fixture
def run_training(monkeypatch):
    from train_samples import make_rows

    monkeypatch.setattr(worker, "read_rows", lambda _folder, _split: make_rows(8))
    original = worker.train
    monkeypatch.setattr(worker, "train", lambda job: original(job, cases=make_cases()))
    return train


def test_grpo_samples_grades_and_updates(tiny_base, tmp_path, local_grader, run_training):
    outcome = run_training(make_grpo_job(tiny_base, tmp_path / "run"))
    steps = read_steps(tmp_path / "run")
    assert outcome.steps == len(steps) == 4
    assert outcome.base_hash_before == outcome.base_hash_after
    journal = EpisodeJournal(tmp_path / "run")
    assert journal.batches() == [1, 2, 3, 4]
    for batch in journal.batches():
        answers, verdicts = journal.answers(batch), journal.verdicts(batch)
        assert len(answers) == len(verdicts) == 8
        assert all(len(answer.tokens) == len(answer.logprobs) for answer in answers)
    assert {"reward", "dead_groups", "entropy", "length", "kl", "pass@1"} <= set(steps[-1].measures)
    assert steps[0].measures["kl"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1].measures["kl"] > 0


@pytest.mark.parametrize("where", ["sampling", "grading", "update", "checkpoint"])
def test_killed_grpo_resumes_to_the_same_bytes_and_grades_nothing_twice(
    tiny_base, tmp_path, tmp_path_factory, local_grader, run_training, monkeypatch, where
):
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.loop import TrainingLoop
    from graftwork.train.rollouts.sampling import RolloutSampler

    if not WHOLE:
        folder = tmp_path_factory.mktemp("grpo") / "whole"
        WHOLE.append((run_training(make_grpo_job(tiny_base, folder)), read_steps(folder)))
    whole, steps = WHOLE[0]
    target, method, after = {
        "sampling": (RolloutSampler, "sample", 3),
        "grading": (EpisodeJournal, "write_verdict", 12),
        "update": (TrainingEngine, "apply", 3),
        "checkpoint": (TrainingLoop, "_save", 2),
    }[where]
    original, calls = getattr(target, method), []

    def die(self, *given, **named):
        calls.append(1)
        if len(calls) == after:
            raise Killed
        return original(self, *given, **named)

    job = make_grpo_job(tiny_base, tmp_path / "killed")
    monkeypatch.setattr(target, method, die)
    with pytest.raises(Killed):
        worker.train(job)
    monkeypatch.setattr(target, method, original)
    again = run_training(job)
    assert again.adapter_hash == whole.adapter_hash
    for path in (tmp_path / "killed" / "episodes").glob("*.verdicts.jsonl"):
        keys = [line["key"] for line in Journal(path).read()]
        assert len(keys) == len(set(keys))
    assert [step.loss for step in read_steps(Path(job.folder))] == [step.loss for step in steps]


def test_a_broken_reward_costs_its_answer_and_is_named(tiny_base, tmp_path, run_training):
    reward = "breaks"
    small = {"steps": 1, "prompts": 2, "answers": 4, "max_tokens": 8}
    job = make_grpo_job(tiny_base, tmp_path / "run", reward=reward, seconds=1.0, rollouts=small)
    outcome = run_training(job)
    verdicts = EpisodeJournal(tmp_path / "run").verdicts(1)
    failed = [verdict for verdict in verdicts.values() if verdict.failed]
    assert failed
    assert all(verdict.reward is None for verdict in failed)
    assert outcome.measures_last["failed_rewards"] == len(failed)
    words = [line["word"] for line in Journal(tmp_path / "run" / "words.jsonl").read()]
    assert sum(f"rewards/own.py:{reward} failed on the answer" in word for word in words) == len(failed)


def test_sampled_log_probabilities_are_those_of_the_trainer(tiny_base, tmp_path, local_grader, run_training):
    """With two updates a batch the second one compares with what the sampler noted."""
    rollouts = {"steps": 1, "prompts": 2, "answers": 4, "max_tokens": 8, "updates": 2}
    run_training(make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts, epochs=1))
    steps = read_steps(tmp_path / "run")
    assert len(steps) == 2
    assert steps[0].measures["ratio"] == pytest.approx(1.0, abs=1e-4)


def test_mix_trains_on_supervised_rows_too(tiny_base, tmp_path, local_grader, run_training):
    mix = {"rl": 0.7, "sft": 0.3, "decay": "to_zero"}
    run_training(make_grpo_job(tiny_base, tmp_path / "run", mix=mix))
    steps = read_steps(tmp_path / "run")
    assert [round(step.measures.get("share_sft", 0.0), 3) for step in steps] == [0.3, 0.2, 0.1, 0.0]
    assert "sft_loss" in steps[0].measures


def test_group_advantages_leave_out_answers_without_a_reward():
    assert group_advantages([1.0, None, 0.0]) == [0.5, None, -0.5]
    assert group_advantages([1.0, None]) == [0.0, None]
    scaled = group_advantages([1.0, 0.0, 1.0, 0.0], scale="group")
    assert scaled == pytest.approx([1, -1, 1, -1], rel=1e-3)


def test_dead_groups_are_those_without_a_difference():
    assert is_dead([0.5, 0.5, None])
    assert is_dead([None, 1.0])
    assert not is_dead([0.0, 1.0])


def test_pass_rates_count_answers_and_groups():
    assert pass_rates([[1.0, 0.0], [0.0, None]]) == (0.25, 0.5)


def test_prompts_are_revisited_by_uncertainty():
    names = [f"p{number}" for number in range(40)]
    history = {name: PromptRecord(16, 16 if number % 2 else 8) for number, name in enumerate(names)}
    drawn = [
        name for batch in range(50) for name in choose_prompts(names, history, count=8, seed=1, batch=batch)
    ]
    uncertain = sum(int(name[1:]) % 2 == 0 for name in drawn)
    assert uncertain > 0.8 * len(drawn)
    assert choose_prompts(names, history, count=8, seed=1, batch=3) == choose_prompts(
        names, history, count=8, seed=1, batch=3
    )
    assert len(set(choose_prompts(names, {}, count=40, seed=1, batch=1))) == 40


def test_measures_of_a_batch_leave_out_canaries():
    def pair(prompt, reward, canary=False):
        answer = SampledAnswer(
            prompt=prompt, answer=0, tokens=(1, 2), logprobs=(-1.0, -3.0), text="x", canary=canary
        )
        return answer, AnswerVerdict(key="k", reward=reward, parts={"m": reward})

    found = measure_groups([[pair("a", 1.0), pair("a", 0.0)], [pair("c", 1.0, canary=True)]])
    assert found["reward"] == 0.5
    assert found["reward/m"] == 0.5
    assert found["dead_groups"] == 0.0
    assert found["entropy"] == 2.0
