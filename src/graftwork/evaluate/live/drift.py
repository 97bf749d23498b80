"""How far live captures have moved from the training data of the last dataset, and when to train again.

Input: an open project. Output: a `PromptDrift`. It is kept until dataset or captures change.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Split
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture, is_from_users, user_texts
from graftwork.records.live import DriftShare, GroupDrift, PromptDrift

LEDGER_ENTRY = "drift"
MOST_CAPTURES = 1000
FEWEST_PROMPTS = 20
RETRAIN_ABOVE = 0.2
"""Retrain if more live prompts than this share are surely unlike any training prompt."""
MOST_READ = 50_000
MOST_EXAMPLES = 5
SHOWN_CHARACTERS = 160
NO_GROUP = "no role"
HELD_OUT: tuple[Split, ...] = ("validation", "test")


def measure_drift(work: OpenProject) -> PromptDrift:
    """Compare the newest captures with the rows of the last dataset."""
    prepared = work.ledger.get("prepare")
    recent = work.captures.page(limit=MOST_CAPTURES)
    newest = tuple(capture for capture in recent if capture.shadow_of is None)
    if prepared is None or not newest:
        return PromptDrift(
            why_not="nothing was captured yet" if prepared is not None else "there is no dataset yet"
        )
    folder = Path(prepared.output["folder"])
    try:
        dataset = read_manifest(folder).content_hash
        key = fingerprint([dataset, newest[0].id, len(newest)])
        entry = work.ledger.get(LEDGER_ENTRY)
        if entry is not None and entry.fingerprint == key:
            return PromptDrift.model_validate(entry.output)
        drift = _measure(folder, newest, dataset=dataset)
    except GraftError as error:
        return PromptDrift(why_not=error.what)
    work.ledger.put(
        LEDGER_ENTRY,
        fingerprint=key,
        output=drift.model_dump(mode="json"),
        finished_at=timestamp(),
        seconds=0.0,
    )
    return drift


def _read_prompts(folder: Path) -> tuple[list[str], list[str], list[str], set[str]]:
    """Prompts and groups of the training rows, held-out prompts, the captures among the training rows."""
    training, groups, captures = [], [], set[str]()
    for row in islice(iterate_rows(folder, "train"), MOST_READ):
        training.append(_join_user_turns([turn.model_dump() for turn in row.messages]))
        groups.append(row.group or NO_GROUP)
        if row.capture is not None:
            captures.add(row.capture.id)
    held_out = [
        _join_user_turns([turn.model_dump() for turn in row.messages])
        for split in HELD_OUT
        for row in islice(iterate_rows(folder, split), MOST_READ)
    ]
    return training, groups, held_out, captures


def find_unlike(work: OpenProject, captures: Sequence[Capture]) -> set[str]:
    """The captures whose prompts differ from every training prompt; none if that cannot be determined."""
    from graftwork.data.drift import FEWEST_HELD_OUT, compare_prompts

    prepared = work.ledger.get("prepare")
    if prepared is None or not captures:
        return set()
    try:
        folder = Path(prepared.output["folder"])
        training, _, held_out, _ = _read_prompts(folder)
    except GraftError:
        return set()
    if len(held_out) < FEWEST_HELD_OUT or not training:
        return set()
    prompts = [_join_user_turns(capture.request.get("messages")) for capture in captures]
    nearest = compare_prompts(training, held_out, prompts)
    return {capture.id for capture, neighbor in zip(captures, nearest, strict=True) if neighbor.unlike}


def _measure(folder: Path, captures: Sequence[Capture], *, dataset: str) -> PromptDrift:
    from graftwork.data.drift import FEWEST_HELD_OUT, compare_prompts, expected_share

    training, groups, held_out, trained = _read_prompts(folder)
    # Each prompt once: repeats of a client are no further evidence.
    live = {
        text: None
        for capture in captures
        if is_from_users(capture.session) and capture.id not in trained
        if (text := _join_user_turns(capture.request.get("messages")))
    }
    empty = PromptDrift(dataset=dataset)
    if len(live) < FEWEST_PROMPTS:
        why = f"{len(live)} live prompts are too few to compare; {FEWEST_PROMPTS} are needed"
        return empty.model_copy(update={"why_not": why})
    if len(held_out) < FEWEST_HELD_OUT or not training:
        why = "the dataset has too few held-out rows to say how far prompts usually are from training rows"
        return empty.model_copy(update={"why_not": why})
    prompts = list(live)
    nearest = compare_prompts(training, held_out, prompts)
    by_group: dict[str, list[bool]] = defaultdict(list)
    for neighbor in nearest:
        by_group[groups[neighbor.place]].append(neighbor.unlike)
    farthest = sorted(range(len(prompts)), key=lambda index: nearest[index].similarity)
    total = _share([neighbor.unlike for neighbor in nearest])
    due = total.low > RETRAIN_ABOVE
    reason = f"no retraining is due: at most {total.high:.0%} are unlike, limit {RETRAIN_ABOVE:.0%}"
    if due:
        reason = f"a retraining is due: at least {total.low:.0%} of the prompts are unlike the training data"
    elif total.high > RETRAIN_ABOVE:
        span = f"between {total.low:.0%} and {total.high:.0%}"
        reason = f"a retraining may be due: {span} are unlike, limit {RETRAIN_ABOVE:.0%}"
    farthest_unlike = [index for index in farthest[:MOST_EXAMPLES] if nearest[index].unlike]
    examples = [" ".join(prompts[index].split()) for index in farthest_unlike]
    return PromptDrift(
        dataset=dataset,
        all=total,
        expected=expected_share(len(held_out)),
        by_group=tuple(
            GroupDrift(group=group, **_share(flags).model_dump())
            for group, flags in sorted(by_group.items(), key=lambda item: (-sum(item[1]), item[0]))
        ),
        examples=tuple(
            text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…" for text in examples
        ),
        due=due,
        reason=reason,
    )


def _share(flags: Sequence[bool]) -> DriftShare:
    different = sum(flags)
    low, high = clopper_pearson(different, n=len(flags))
    return DriftShare(prompts=len(flags), unlike=different, share=different / len(flags), low=low, high=high)


def _join_user_turns(messages: Any) -> str:
    return "\n".join(user_texts(messages)).strip()
