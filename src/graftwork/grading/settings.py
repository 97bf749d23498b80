"""Settings of rewards: the parts of the sum, and task sets of verifiers."""

from typing import Annotated, Any

from pydantic import Field

from graftwork.records.base import NotSecret, Record

TRL, RANK = "trl:", "rank:"
"""Functions with the signature of TRL's rewards, and functions that compare the answers to one prompt."""


class RewardSettings(Record):
    """One part of the reward."""

    metric: str = Field(
        description="A metric, a check of `evaluate.checks`, `rewards/own.py:function`, "
        "`trl:file.py:function` with the signature of TRL's rewards, or `rank:file.py:function`, which "
        "compares answers that tie; `environment` and `taskset` are the rewards of those."
    )
    weight: float = Field(1.0, description="Weight of this part in the sum.")
    gate: bool = Field(False, description="The reward is 0 unless this part is 1.")

    @property
    def ranks(self) -> bool:
        return self.metric.startswith(RANK)


class TasksetSettings(Record):
    """A task set of verifiers v1: its tasks are the prompts, its rewards are the reward `taskset`."""

    name: str = Field(min_length=1, description="The task set, as `vf-eval` names it.")
    python: str = Field(
        description="The interpreter of an environment with verifiers and the task set, such as "
        "`envs/verifiers/bin/python`."
    )
    folder: str | None = Field(
        None,
        description="Folder in the project that contains the task set's package, if that is not installed.",
    )
    options: Annotated[dict[str, Any], NotSecret("settings of a task set; keys are read from variables")] = (
        Field(
            default_factory=dict, description="Settings of the task set, as under `env.taskset` of verifiers."
        )
    )
    tasks: int = Field(1000, ge=1, description="Maximum number of tasks to read.")
    reference: str | None = Field(
        None,
        description="A correct answer built from the fields of a task, such as `{answer}`: `graft reward "
        "check` tries it.",
    )
