"""The settings of preferences and reinforcement learning: losses, rollouts, rewards, the mix."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record
from graftwork.text.redact import EndpointUrl, VariableName

Objective = Literal["sft", "dpo", "orpo", "kto", "grpo"]
OBJECTIVE_SETTINGS = ("objective", "preferences", "policy", "rollouts", "rewards", "reward_checks", "mix")
USED_BY: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("objective", "preferences"),
    "orpo": ("objective", "preferences"),
    "kto": ("objective", "preferences"),
    "grpo": ("objective", "policy", "rollouts", "rewards", "reward_checks", "mix"),
}
"""The settings above that change what an objective learns."""
SPLITS_WITH_PROMPTS = ("rl", "train")
GENTLE_RATE = 1e-4
"""The default learning rate of every objective but supervised fine-tuning."""


class PreferenceSettings(Record):
    """Training on pairs of a chosen and a rejected reply, or on replies that are good or bad (KTO)."""

    beta: float = Field(
        0.1, gt=0, description="DPO, KTO: strength of the reference. ORPO: weight of the odds ratio."
    )
    sft: float = Field(0.0, ge=0, description="Weight of the supervised loss on chosen replies (DPO).")
    undesirable: float = Field(
        1.0, gt=0, description="Weight of bad replies, where that of good ones is 1 (KTO)."
    )
    least_score: float | None = Field(
        None,
        description="Logged scores below this make a reply a bad one (KTO); the scores are audited first.",
    )


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


class EnvironmentSettings(Record):
    """Who answers the model between its replies, for episodes of several turns. It runs in the sandbox."""

    python: str | None = Field(
        None,
        description="A class of the project, `envs/file.py:Class`, with `step` or with methods as tools.",
    )
    command: Annotated[tuple[str, ...], NotSecret("it runs where no network can use a secret")] = Field(
        (), description="A program that answers JSON lines; `python` is the interpreter of the sandbox."
    )
    files: tuple[str, ...] = Field((), description="More files of the project that the environment reads.")
    turns: int = Field(4, ge=1, description="Most replies of the model in an episode.")
    max_tokens: int = Field(256, ge=2, description="Longest episode in tokens, without the prompt.")
    seconds: float = Field(5.0, gt=0, le=3600, description="Time limit of one turn of the environment.")
    role: Literal["user", "tool"] = Field("user", description="The role in which the environment speaks.")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.python is None) == (not self.command):
            raise ValueError("an environment is either `python: file.py:Class` or a `command`")
        if self.python is not None and not self.python.partition(":")[2].isidentifier():
            raise ValueError(f"{self.python} names no class: write envs/file.py:Class")
        return self


class RolloutEndpointSettings(Record):
    """A server that answers instead of the model in training, such as vLLM on another GPU."""

    url: EndpointUrl = Field(description="The address up to `/v1`.")
    model: str = Field(description="The model that the server answers with: the base, or an adapter.")
    api_key_env: VariableName | None = Field(None, description="The environment variable with the API key.")
    load_adapters: bool = Field(
        True,
        description="Load the adapter into the server before each batch (vLLM with runtime LoRA updating, "
        "which can read the run's folder).",
    )
    concurrency: int = Field(16, ge=1, le=512, description="Requests at a time.")
    seconds: float = Field(300.0, gt=0, description="Time limit of one request.")


class TasksetSettings(Record):
    """A task set of verifiers v1: its tasks are the prompts, its rewards are the reward `taskset`."""

    name: str = Field(min_length=1, description="The task set, as `vf-eval` names it.")
    python: str = Field(
        description="The interpreter of an environment with verifiers and the task set, such as "
        "`envs/verifiers/bin/python`."
    )
    folder: str | None = Field(
        None, description="A folder of the project with the package of the task set, if it is not installed."
    )
    options: Annotated[dict[str, Any], NotSecret("settings of a task set; keys are read from variables")] = (
        Field(
            default_factory=dict, description="Settings of the task set, as under `env.taskset` of verifiers."
        )
    )
    tasks: int = Field(1000, ge=1, description="Most tasks that are read.")
    reference: str | None = Field(
        None,
        description="A right answer made of the fields of a task, such as `{answer}`: `graft reward check` "
        "tries it.",
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
    prompts_at_once: int | None = Field(
        None, ge=1, description="Prompts that are answered together; fewer take less memory. Default: all."
    )
    truncated: Literal["fail", "grade"] = Field(
        "fail", description="Whether an answer that reaches max_tokens gets 0, or is graded as it is."
    )
    updates: int = Field(1, ge=1, description="Optimizer steps per batch of rollouts.")
    environment: EnvironmentSettings | None = Field(
        None, description="Who answers between replies: then an answer is an episode of several turns."
    )
    taskset: TasksetSettings | None = Field(
        None, description="Prompts and rewards of a task set of verifiers, instead of `source`."
    )
    endpoint: RolloutEndpointSettings | None = Field(
        None, description="Sample from a server instead of the model in training."
    )

    @property
    def asks_rows(self) -> bool:
        """Whether the prompts are rows of the dataset."""
        return self.taskset is None and self.source in SPLITS_WITH_PROMPTS

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer, with all turns of its episode."""
        return self.max_tokens if self.environment is None else self.environment.max_tokens

    @model_validator(mode="after")
    def _endpoint_updates_once(self) -> Self:
        if self.endpoint is not None and self.updates > 1:
            raise ValueError("answers of an endpoint are trained on once: set `updates: 1`")
        return self

    @model_validator(mode="after")
    def _taskset_asks_alone(self) -> Self:
        if self.taskset is None:
            return self
        if self.environment is not None:
            raise ValueError("a task set is answered with one reply: remove `environment` or `taskset`")
        if self.source != type(self).model_fields["source"].default:
            raise ValueError("prompts come from `source` or from `taskset`: remove one of them")
        return self


class RewardSettings(Record):
    """One part of the reward."""

    metric: str = Field(
        description="A metric, a check of `evaluate.checks`, `rewards/own.py:function`, "
        "`trl:file.py:function` with the signature of TRL's rewards, or `rank:file.py:function`, which "
        "compares answers that tie; `environment` and `taskset` are the rewards of those."
    )
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
