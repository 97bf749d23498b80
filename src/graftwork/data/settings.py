"""How logs become a dataset: the `data:` part of graft.yaml."""

from typing import Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record


class DataSettings(Record):
    """Which rows are kept, what is done to them and how they are split."""

    logs: tuple[str, ...] = Field((), description="Log files or globs, relative to the project's folder.")
    system_prompt: str | None = Field(
        None, description="Replaces the logged system prompt in every row; without it the logged one stays."
    )
    keep_status: tuple[str, ...] = Field(
        ("success", "succeeded", "ok", "completed"),
        description="Rows whose log states another status are dropped. A row without a status is kept.",
    )
    drop_failed: bool = Field(
        True, description="Drop rows with another status, and replies that are error messages in disguise."
    )
    drop_placeholders: bool = Field(True, description="Drop replies that only hold a place: 'Mock response'.")
    drop_truncated: bool = Field(True, description="Drop replies that were cut off.")
    redact: bool = Field(True, description="Replace secrets and personal data by placeholders.")
    near_duplicate: float = Field(
        0.85, gt=0, le=1, description="Rows at least this alike, question and reply, count as one."
    )
    conflicts: Literal["keep_last", "drop_all", "keep_all"] = Field(
        "keep_last",
        description="Which replies to the same prompt are kept: the last one logged, none, all.",
    )
    question_similarity: float = Field(
        0.7, gt=0, le=1, description="Questions at least this alike never stand in two splits."
    )
    validation: float = Field(0.1, ge=0, lt=1, description="The share of question groups for validation.")
    test: float = Field(0.2, ge=0, lt=1, description="The share of question groups held out for evaluation.")
    max_tokens: int = Field(
        1024, ge=8, description="Rows that render to more tokens are dropped, never cut, and counted."
    )
    seed: int = Field(0, description="Another seed deals the groups to the splits anew.")

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation {self.validation} and test {self.test} leave nothing to train on: "
                "together they must stay below 1"
            )
        return self
