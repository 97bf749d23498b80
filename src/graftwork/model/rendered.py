"""What rendering gives: the tokens of a row and where training begins, or a refusal."""

from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.records.errors import UserMistake


@dataclass(frozen=True)
class RenderedTokens:
    """`tokens[trained_from:]` is the reply and the token that ends its turn."""

    tokens: Sequence[int]
    trained_from: int


class CannotProve(UserMistake):
    """The trained tokens of a row cannot be shown to be its reply."""


def not_a_plain_turn() -> CannotProve:
    return CannotProve(
        "the chat template does not write this reply as prompt, reply, end of turn",
        why="trained on it, the model would learn a turn that serving never asks for",
        fix="drop the row; or, where the base model always reasons first, set data.reasoning to drop",
    )


def does_not_survive() -> CannotProve:
    return CannotProve(
        "the reply does not survive the tokenizer",
        why="its tokens decode to another text",
        fix="normalise the text (often a stray control character) or drop the row",
    )
