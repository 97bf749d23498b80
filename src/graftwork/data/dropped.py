"""The list of rows that were left out, each with its step and reason, block by block.

In: the corpus and what each step decided. Out: tables for the dataset's folder, in the order of
sight. Every line of the logs stands either in a shard or here.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftwork.data.corpus import Corpus, Segment
from graftwork.data.dealing import Dealing
from graftwork.data.repeats import Repeats
from graftwork.files.dataset import drops_table
from graftwork.records.dataset import Drop
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    import pyarrow as pa

REPEAT_STEPS = ("", "conflicting_answers", "duplicate", "near_duplicate")
"""The steps by the numbers that `Repeats.step` gives them."""

_WORDS = {
    "conflicting_answers": "other reply to the same prompt in",
    "duplicate": "the same as",
    "near_duplicate": "nearly the same as",
}


UNFIT_REFERENCE = (
    "no reference for a test: a model wrote this reply to a held-out question and nobody confirmed it"
)


class Outcomes(NamedTuple):
    """What each step decided, by place."""

    repeats: Repeats
    dealing: Dealing
    refused: Mapping[int, str]
    shortened: Mapping[int, str]
    unwanted: Collection[int]
    unfit_references: Collection[int] = ()


def list_dropped(corpus: Corpus, decided: Outcomes) -> Iterator["pa.Table"]:
    """Rows that could not be read first, then the others in their order."""
    unread = [
        Drop(origin=fault.origin, step="read", reason=f"{fault.code}: {fault.message}", input_hash=line_hash)
        for line_hash, fault in corpus.faults()
    ]
    yield drops_table(unread)
    for first, segment in corpus.by_segment():
        yield drops_table(_of_segment(corpus, first, segment, decided))


def _of_segment(corpus: Corpus, first: int, segment: Segment, decided: Outcomes) -> Iterator[Drop]:
    columns = corpus.read_columns(segment, ["line", "input_hash", "passed", "fault", "reason"])
    for number in range(segment.stop - segment.start):
        place = first + number
        drop = _judge(corpus, place, number, columns, decided)
        if drop is not None:
            step, reason = drop
            origin = Origin(file=segment.file, line=segment.first_line + columns["line"][number])
            yield Drop(origin=origin, step=step, reason=reason, input_hash=columns["input_hash"][number])


def _judge(
    corpus: Corpus, place: int, number: int, columns: Mapping[str, list[Any]], decided: Outcomes
) -> tuple[str, str] | None:
    repeats, dealing = decided.repeats, decided.dealing
    if place in corpus.withdrawn or not columns["passed"][number]:
        fault = f"{columns['fault'][number]}: {columns['reason'][number]}"
        return "filter", corpus.withdrawn.get(place, fault)
    if repeats.instead[place] >= 0:
        step = REPEAT_STEPS[repeats.step[place]]
        return step, f"{_WORDS[step]} {corpus.origin(int(repeats.instead[place]))}"
    if place in dealing.aside or place in decided.unfit_references:
        pair = dealing.aside.get(place)
        return "split", UNFIT_REFERENCE if pair is None else _say_aside(corpus, place, *pair)
    if place in decided.unwanted:
        return "models", "no model under models: is made of it"
    if place in decided.refused or place in decided.shortened:
        # A row that was shortened stands in a shard too, without the part that was left out.
        step = "render" if place in decided.refused else "render_part"
        return step, decided.refused.get(place) or decided.shortened[place]
    return None


def _say_aside(corpus: Corpus, place: int, one: int, other: int) -> str:
    if other == place:
        return f"set aside: it asks what {corpus.origin(one)} asks, and stood in another split before"
    return (
        f"set aside: it asks what {corpus.origin(one)} and {corpus.origin(other)} ask, "
        "which stand in different splits"
    )


def count_kept(
    *,
    passed: "np.ndarray[Any, Any]",
    repeats: Repeats,
    dealing: Dealing,
    refused: int,
    unfit_references: Collection[int] = (),
) -> dict[str, int]:
    """How many rows were left after each step."""
    left = int(passed.sum())
    after = {"read": len(passed), "filter": left, "redact": left}
    for number, step in enumerate(REPEAT_STEPS[1:], start=1):
        left -= int(((repeats.step == number) & passed).sum())
        after[step] = left
    after["split"] = left - sum(
        1 for places in (dealing.aside, unfit_references) for place in places if repeats.instead[place] < 0
    )
    after["render"] = after["split"] - refused
    return after
