"""Errors of settings say in plain words what a value must be."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from graftwork.text.wording import explain_error


class Settings(BaseModel):
    epochs: int = Field(1, ge=1)
    rate: float = Field(0.1, gt=0, le=1)
    names: tuple[str, ...] = ()
    method: Literal["lora", "full"] = "lora"
    title: Annotated[str, Field(min_length=1)] = "x"
    limits: dict[str, int] = {}
    shuffle: bool = True


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epochs", "abc", "must be a whole number"),
        ("epochs", 1.5, "must be a whole number"),
        ("epochs", 0, "must be at least 1"),
        ("rate", 0, "must be above 0"),
        ("rate", 2, "must be at most 1"),
        ("names", 5, "must be a list"),
        ("method", "dpo", "must be 'lora' or 'full'"),
        ("title", "", "must not be empty"),
        ("limits", [1], "must be keys and values"),
        ("shuffle", 7, "must be true or false"),
    ],
)
def test_an_error_says_what_the_value_must_be(key, value, words):
    with pytest.raises(ValidationError) as refused:
        Settings.model_validate({key: value})
    assert explain_error(refused.value.errors()[0]) == words
