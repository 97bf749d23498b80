"""Lint rules about reinforcement learning."""

import pytest

from graftwork.plan.lint.configuration import Configuration, LintContext
from graftwork.plan.lint.project import RULES


def find(**fields):
    config = Configuration(file="f.yaml", kind="training", **fields)
    return {rule.id for rule in RULES if rule.id.startswith("rl-") for _ in rule.check(config, LintContext())}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"algorithm": "grpo", "method": "lora", "learning_rate": 1e-6}, {"rl-rate-too-low"}),
        ({"algorithm": "grpo", "method": "full", "learning_rate": 1e-6}, set()),
        ({"algorithm": "sft", "method": "lora", "learning_rate": 1e-6}, set()),
        ({"algorithm": "GRPO", "answers": 2}, {"rl-few-answers"}),
        ({"algorithm": "grpo", "answers": 4, "reward_scale": "group"}, {"rl-deviation-of-few"}),
        ({"algorithm": "grpo", "answers": 8, "reward_scale": "group"}, set()),
        ({"algorithm": "grpo", "method": "lora", "learning_rate": 1e-4, "answers": 8}, set()),
    ],
)
def test_mistakes_of_reinforcement_learning_are_found(fields, expected):
    assert find(**fields) == expected
