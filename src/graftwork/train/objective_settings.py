"""The settings of preferences and reinforcement learning: losses, rollouts, rewards, the mix."""

from typing import Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record

Objective = Literal["sft", "dpo", "orpo", "grpo"]
OBJECTIVE_SETTINGS = ("objective", "preferences", "policy", "rollouts", "rewards", "reward_checks", "mix")
USED_BY: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("objective", "preferences"),
    "orpo": ("objective", "preferences"),
    "grpo": ("objective", "policy", "rollouts", "rewards", "reward_checks", "mix"),
}
"""The settings above that change what an objective learns."""
GENTLE_RATE = 1e-4
"""The default learning rate of every objective but supervised fine-tuning."""


class PreferenceSettings(Record):
    """Training on pairs of a chosen and a rejected reply."""

    beta: float = Field(
        0.1, gt=0, description="DPO: strength of the reference. ORPO: weight of the odds ratio."
    )
    sft: float = Field(0.0, ge=0, description="Weight of the supervised loss on chosen replies (DPO).")


class PolicySettings(Record):
    """The loss over sampled answers."""

    loss: Literal["grpo", "cispo", "gspo"] = Field(
        "grpo", description="Loss for more than one update per batch; with one update they are the same."
    )
    normalize: Literal["dapo", "dr_grpo", "grpo"] = Field(
        "dapo",
        description="Divide by all tokens (dapo), by answers times max_tokens (dr_grpo), or each answer by "
        "its own tokens (grpo).",
    )
    scale: Literal["none", "group"] = Field(
        "none", description="`group` divides advantages by the deviation of the group's rewards."
    )
    epsilon_low: float = Field(0.2, ge=0, lt=1, description="Clip range below 1.")
    epsilon_high: float = Field(0.2, ge=0, description="Clip range above 1.")
    cispo_cap: float = Field(5.0, gt=0, description="Largest ratio of CISPO.")
    kl: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence to the start, which is measured unless `method` is full.",
    )


class RolloutSettings(Record):
    """Which prompts are answered in a step, and how."""

    source: str = Field(
        "rl",
        description="Prompts: a split of the dataset (`rl`, `train`), or a JSONL file of cases.",
    )
    steps: int = Field(20, ge=1, description="Batches of rollouts.")
    prompts: int = Field(8, ge=1, description="Prompts per batch.")
    answers: int = Field(8, ge=2, description="Answers per prompt.")
    max_tokens: int = Field(48, ge=1, description="Longest answer in tokens.")
    truncated: Literal["fail", "grade"] = Field(
        "fail", description="Whether an answer that reaches max_tokens gets 0, or is graded as it is."
    )
    temperature: float = Field(1.0, gt=0, description="Temperature of sampling; only 1 is supported.")
    updates: int = Field(1, ge=1, description="Optimizer steps per batch of rollouts.")
    revisit: bool = Field(
        True, description="Prefer prompts that are sometimes solved, by p(1 − p) of the share solved so far."
    )


class RewardSettings(Record):
    """One part of the reward."""

    metric: str = Field(description="A metric, a check of `evaluate.checks`, or `rewards/own.py:function`.")
    weight: float = Field(1.0, description="Weight of this part in the sum.")
    gate: bool = Field(False, description="The reward is 0 unless this part is 1.")


class RewardCheckSettings(Record):
    """Guards against rewards that can be cheated."""

    seconds: float = Field(5.0, gt=0, description="Time limit of one reward function for one answer.")
    hacks: bool = Field(True, description="Run the catalogue of hacks before training.")
    canaries: int = Field(
        4, ge=0, description="Unsolvable prompts added to the first batch: a reward is an alarm."
    )
    audit_share: float = Field(
        0.0, ge=0, lt=1, description="Share of each case's checks that never reward and only audit."
    )
    stop_when_apart: float = Field(
        0.3, gt=0, le=1, description="Stop when reward exceeds the audit by this much for three batches."
    )
    preflight: bool = Field(
        True, description="Stop before step 1 if almost no prompt or every prompt is solved."
    )


class MixSettings(Record):
    """Supervised rows next to rollouts, as shares of the gradient's weight."""

    rl: float = Field(1.0, gt=0, le=1, description="Share of the sampled answers.")
    sft: float = Field(0.0, ge=0, lt=1, description="Share of supervised training rows.")
    decay: Literal["none", "linear", "to_zero"] = Field(
        "none", description="How the supervised share falls: not, to half, or to zero at the last step."
    )

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        if abs(self.rl + self.sft - 1) > 1e-9:
            raise ValueError(f"the shares of a mix add up to 1, not {self.rl + self.sft:g}")
        return self

    def shares(self, step: int, steps: int) -> tuple[float, float]:
        """The shares of sampled answers and supervised rows at step 1 … `steps`."""
        done = (step - 1) / max(steps - 1, 1)
        factor = {"none": 1.0, "linear": 1 - done / 2, "to_zero": 1 - done}[self.decay]
        sft = self.sft * factor
        return 1 - sft, sft
