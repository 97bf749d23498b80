"""The list of rows that were left out, each with its step and reason, block by block.

In: the corpus and what each step decided. Out: tables for the dataset's folder, in the order of
sight. Every line of the logs stands either in a shard or here.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from graftwork.data.corpus import Corpus, Segment
from graftwork.data.dealing import Dealing
from graftwork.data.repeats import Repeats
from graftwork.files.dataset_folder import drops_table
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


def list_dropped(
    corpus: Corpus, *, repeats: Repeats, dealing: Dealing, refused: Mapping[int, str]
) -> Iterator["pa.Table"]:
    """`refused` holds what the rendering said, by place."""
    unread = [
        Drop(origin=fault.origin, step="read", reason=f"{fault.code}: {fault.message}", input_hash=line_hash)
        for line_hash, fault in corpus.faults()
    ]
    yield drops_table(unread)
    for first, segment in corpus.by_segment():
        yield drops_table(_of_segment(corpus, first, segment, repeats, dealing, refused))


def _of_segment(
    corpus: Corpus,
    first: int,
    segment: Segment,
    repeats: Repeats,
    dealing: Dealing,
    refused: Mapping[int, str],
) -> Iterator[Drop]:
    columns = corpus.read_columns(segment, ["line", "input_hash", "passed", "fault", "reason"])
    for number in range(segment.stop - segment.start):
        place = first + number
        drop = _judge(corpus, place, number, columns, repeats, dealing, refused)
        if drop is not None:
            step, reason = drop
            origin = Origin(file=segment.file, line=segment.first_line + columns["line"][number])
            yield Drop(origin=origin, step=step, reason=reason, input_hash=columns["input_hash"][number])


def _judge(
    corpus: Corpus,
    place: int,
    number: int,
    columns: Mapping[str, list[Any]],
    repeats: Repeats,
    dealing: Dealing,
    refused: Mapping[int, str],
) -> tuple[str, str] | None:
    if not columns["passed"][number]:
        return "filter", f"{columns['fault'][number]}: {columns['reason'][number]}"
    if repeats.instead[place] >= 0:
        step = REPEAT_STEPS[repeats.step[place]]
        return step, f"{_WORDS[step]} {corpus.origin(int(repeats.instead[place]))}"
    if place in dealing.aside:
        one, other = dealing.aside[place]
        return "split", f"set aside: it asks what {corpus.origin(one)} and {corpus.origin(other)} ask, " + (
            "which stand in different splits"
        )
    return ("render", refused[place]) if place in refused else None


def count_kept(
    *, passed: "np.ndarray[Any, Any]", repeats: Repeats, dealing: Dealing, refused: int
) -> dict[str, int]:
    """How many rows were left after each step."""
    left = int(passed.sum())
    after = {"read": len(passed), "filter": left, "redact": left}
    for number, step in enumerate(REPEAT_STEPS[1:], start=1):
        left -= int(((repeats.step == number) & passed).sum())
        after[step] = left
    after["split"] = left - sum(1 for place in dealing.aside if repeats.instead[place] < 0)
    after["render"] = after["split"] - refused
    return after
