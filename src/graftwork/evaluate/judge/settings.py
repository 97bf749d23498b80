"""What graft.yaml says about the judge, checked when it is read."""

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from graftwork.records.base import Record
from graftwork.records.secret import NotSecret
from graftwork.text.redact import VariableName

RUBRIC = (
    "Is the answer correct, complete, supported by what the user gave, and in the form that was asked for? "
    "Length by itself is no merit."
)


class JudgeSettings(Record):
    """Another model that says which answer is better. The key is never written anywhere."""

    url: Annotated[str, NotSecret("a login or a query in it is refused")] = Field(
        description="Where the endpoint is, up to /v1: https://host/v1."
    )
    model: str = Field(min_length=1, description="The model to ask there.")
    key_variable: VariableName | None = Field(
        None,
        description="The environment variable that holds the key; no key is sent without it.",
    )
    modes: tuple[Literal["pairwise", "pointwise"], ...] = Field(
        ("pairwise",),
        description="pairwise: which of two answers is better, asked in both orders; pointwise: a mark 1–5.",
    )
    rubric: str = Field(RUBRIC, min_length=1, description="What the judge goes by, in words.")
    show_reference: bool = Field(True, description="Show the judge the reply that the log holds.")
    max_answer_characters: int = Field(20_000, ge=100, description="Longer answers are cut for the judge.")
    max_tokens: int = Field(512, ge=16, description="What the judge may say to one question.")
    timeout_seconds: float = Field(60.0, gt=0, description="What one question may take.")
    attempts: int = Field(
        5, ge=1, le=20, description="How often a question is asked that meets with an error."
    )
    concurrency: int = Field(4, ge=1, le=64, description="Questions asked side by side.")
    max_questions: int | None = Field(None, ge=1, description="Never ask more than so many questions.")
    max_seconds: float | None = Field(None, gt=0, description="Ask nothing more after so many seconds.")
    max_cost: float | None = Field(
        None, gt=0, description="Ask nothing more after so much money; needs prices."
    )
    price_in: float | None = Field(None, ge=0, description="Price of a million tokens that the judge reads.")
    price_out: float | None = Field(None, ge=0, description="Price of a million tokens that it writes.")

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address begins with http:// or https://")
        if parts.username or parts.password or parts.query:
            raise ValueError("an address with a key in it would be written everywhere: use key_variable")
        return url.rstrip("/").removesuffix("/chat/completions")

    @model_validator(mode="after")
    def _cost_has_prices(self) -> Self:
        if self.max_cost is not None and (self.price_in is None or self.price_out is None):
            raise ValueError("max_cost needs price_in and price_out: else nothing is known about the cost")
        if not self.modes:
            raise ValueError("modes: name pairwise, pointwise or both")
        return self
