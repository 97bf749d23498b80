"""GRPO through the real worker learns what the reward pays for, and learns nothing from a shuffled reward."""

import json
import random
import shutil
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train_rollouts import LocalGrader, make_grpo_job, run_training  # noqa: F401

from graftwork.grading.rewards import AnswerVerdict
from graftwork.train.run_folder import read_steps

STEPS = 40
"""Of five other seeds, all had learned it by step 32: another processor samples other answers."""


class ShuffledGrader(LocalGrader):
    """The rewards of the honest grader, given to the answers of a batch by chance."""

    def __init__(self, spec):
        super().__init__(spec)
        self._chance = random.Random(5)

    def grade_all(self, questions):
        graded = list(super().grade_all(questions))
        rewards = [found.reward for found in graded]
        self._chance.shuffle(rewards)
        for found, reward in zip(graded, rewards, strict=True):
            yield AnswerVerdict(key=found.key, reward=reward, parts=found.parts)


def learn(base, folder, run, *, steps=STEPS):
    """What the answers of each step are worth by the honest reward, whatever the run was paid."""
    rollouts = {"steps": steps, "prompts": 2, "num_generations": 12, "max_completion_length": 4}
    run(
        make_grpo_job(
            base, folder, reward="likes_er", learning_rate=5e-3, rollouts=rollouts, checkpoint_every=steps
        )
    )
    done = read_steps(folder)
    (part,) = [name for name in done[0].measures if name.startswith("reward/")]
    return [step.measures[part] for step in done]


@pytest.fixture(scope="module")
def decided_base(tiny_base, tmp_path_factory):
    """A random model whose head separates tokens, so that an adapter can prefer some of them."""
    folder = tmp_path_factory.mktemp("decided") / "base"
    shutil.copytree(tiny_base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    size = weights["model.embed_tokens.weight"].shape
    weights["lm_head.weight"] = 0.25 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def _settled():
    yield
    torch.use_deterministic_algorithms(False)


def test_grpo_raises_the_reward_and_a_shuffled_reward_does_not(
    decided_base,
    tmp_path,
    monkeypatch,
    run_training,  # noqa: F811
):
    monkeypatch.setattr("graftwork.grading.rewards.RewardRunner", LocalGrader)
    honest = learn(decided_base, tmp_path / "honest", run_training)
    monkeypatch.setattr("graftwork.grading.rewards.RewardRunner", ShuffledGrader)
    shuffled = learn(decided_base, tmp_path / "shuffled", run_training, steps=STEPS // 2)
    assert fmean(honest[:2]) < 0.2
    assert fmean(honest[-4:]) > 0.8
    assert fmean(shuffled[-4:]) < 0.3
