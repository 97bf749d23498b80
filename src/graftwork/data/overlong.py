"""What becomes of a row that is longer than the training length.

In: the turns and the reply of a row, and a function that counts their tokens. Out: the rows that
are made of it, each of which fits, and where something was left out, why. Turns are left out whole;
no text is ever cut: half an answer teaches half answers. Does not know tokenizers or templates.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Message

Count = Callable[[Sequence[Message], str], int]


class Exchange(NamedTuple):
    """What is asked and what is to be learned as the answer."""

    messages: tuple[Message, ...]
    reply: str


class Fitted(NamedTuple):
    """The rows made of one row. `reason` says what was left out; it is empty where nothing was."""

    rows: list[Exchange]
    reason: str = ""


def fit(messages: Sequence[Message], reply: str, *, count: Count, settings: DataSettings) -> Fitted:
    """The row as it is where it fits; otherwise what the rule `overlong` makes of it."""
    whole = Exchange(tuple(messages), reply)
    tokens, most = count(whole.messages, reply), settings.max_tokens
    if tokens <= most:
        return Fitted([whole])
    too_long = f"{tokens} tokens, more than max_tokens {most}"
    if settings.overlong == "drop":
        return Fitted([], too_long)
    if settings.overlong == "truncate":
        return _truncate(whole, count=count, most=most, too_long=too_long)
    return _split_by_turn(whole, count=count, most=most, too_long=too_long)


def _truncate(whole: Exchange, *, count: Count, most: int, too_long: str) -> Fitted:
    kept = _leave_out_oldest(whole, count=count, most=most)
    if kept is None:
        return Fitted([], f"{too_long}, and its last question and reply alone do not fit")
    left_out = len(whole.messages) - len(kept.messages)
    return Fitted([kept], f"{too_long}: {left_out} of its turns left out, the oldest")


def take_each_answer(messages: Sequence[Message], reply: str) -> list[Exchange]:
    """A row of each assistant turn that answers somebody, with all that stood before it."""
    turns = (*messages, Message(role="assistant", content=reply))
    asked = next((at for at, turn in enumerate(turns) if turn.role == "user"), len(turns))
    return [
        Exchange(turns[:at], turn.content)
        for at, turn in enumerate(turns)
        if at > asked and turn.role == "assistant" and turn.content.strip()
    ]


def _split_by_turn(whole: Exchange, *, count: Count, most: int, too_long: str) -> Fitted:
    """A row of each answer, with as much before it as fits."""
    answers = take_each_answer(*whole)
    fitting = (_leave_out_oldest(answer, count=count, most=most) for answer in answers)
    rows = [row for row in fitting if row is not None]
    if not rows:
        return Fitted([], f"{too_long}, and none of its turns fits with its question alone")
    alone = len(answers) - len(rows)
    lost = f"; {alone} too long with their question alone" if alone else ""
    return Fitted(rows, f"{too_long}: split into {len(rows)} of its {len(answers)} answers{lost}")


def _leave_out_oldest(row: Exchange, *, count: Count, most: int) -> Exchange | None:
    """The longest end of the conversation that fits, behind the system turns; None if none does.

    An end is the whole, or begins with a turn of the user: so no reply stands without its question,
    and no result of a tool without the call that it answers.
    """
    questions = [at for at, message in enumerate(row.messages) if message.role == "user"]
    if not questions:
        return None
    begins = sorted({0, *questions})

    def end(place: int) -> Exchange:
        kept = (m for at, m in enumerate(row.messages) if at >= begins[place] or m.role == "system")
        return Exchange(tuple(kept), row.reply)

    def does_fit(place: int) -> bool:
        return count(*end(place)) <= most

    fits = len(begins) - 1
    if not does_fit(fits):
        return None
    # Backwards in growing strides, in shorter ones after a miss: a long conversation is not counted
    # whole for each of its turns.
    first, stride = 0, 1
    while first < fits:
        probe = max(fits - stride, first)
        if does_fit(probe):
            fits, stride = probe, 2 * stride
        else:
            first = probe + 1
            stride = max((fits - first + 1) // 2, 1)
    return end(fits)
