"""Rules about reinforcement learning: rates made for full weights, groups too small to compare. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.facts import Configuration, LintContext, LintRule, RuleHit

SAMPLING = frozenset({"grpo", "rloo", "ppo", "dapo", "dr_grpo", "gspo", "cispo"})
"""Algorithms that learn from sampled answers."""
LEAST_ADAPTER_RATE = 1e-5
LEAST_ANSWERS = 4
ANSWERS_FOR_DEVIATION = 8


def _samples(config: Configuration) -> bool:
    return (config.algorithm or "").lower() in SAMPLING


def rate_suits_full_weights(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    rate = config.learning_rate
    if not _samples(config) or config.method in (None, "full") or rate is None or rate >= LEAST_ADAPTER_RATE:
        return
    yield RuleHit(
        f"a learning rate of {rate:g} for {config.method} with {config.algorithm}",
        "the default of TRL, 1e-6, is made for full weights: adapters learned nothing at such rates",
        "take 5e-5 to 2e-4",
        ("learning_rate", "algorithm"),
    )


def group_is_small(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if _samples(config) and config.answers is not None and config.answers < LEAST_ANSWERS:
        yield RuleHit(
            f"{config.answers} answers to a prompt",
            "the mean of so few is a poor baseline, and most groups have no difference in reward",
            "take 8 to 16 answers, and fewer prompts a step",
            ("answers",),
        )


def deviation_of_few(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    few = config.answers is not None and config.answers < ANSWERS_FOR_DEVIATION
    if _samples(config) and few and config.reward_scale in ("group", "True", "true"):
        yield RuleHit(
            f"advantages are divided by the deviation of {config.answers} rewards",
            "with few answers a deviation near zero makes advantages huge; runs ended in NaN",
            "do not divide (`policy.scale: none`; TRL: scale_rewards none), or take 8 answers and more",
            ("reward_scale", "answers"),
        )


REWARD_RULES = (
    LintRule(
        "rl-rate-too-low",
        "warning",
        "a rate for full weights with an adapter",
        rate_suits_full_weights,
        "trl#2872; LoRA Without Regret",
    ),
    LintRule("rl-few-answers", "warning", "groups of fewer than four answers", group_is_small),
    LintRule(
        "rl-deviation-of-few",
        "warning",
        "division by the deviation of few rewards",
        deviation_of_few,
        "mlx-lm-lora#50",
    ),
)
