"""Attempts as training data: interactions with stage, reward and verdicts, pairs, prompts for rollouts.

In: a journal and its plan. Out: rows. Components that are held out become evaluation cases and nothing else;
a prompt that a project holds out is left out too.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from graftwork.components.generate.attempts import ANSWER, ATTEMPT, PROMPT, VERDICT, GenerationJournal
from graftwork.components.generate.prompts import prompt_hash, write_prompt
from graftwork.components.generate.run import ACCEPTED
from graftwork.components.spec.cases import Stage
from graftwork.components.spec.component import Component, ComponentPlan
from graftwork.records.base import Record

PASSED, FAILED = "success", "failed"


Episode = tuple[str, str, dict[str, Any]]
"""The hash of the prompt, the answer, and the row of a log without the answer."""


class EpisodeFiles(Record):
    """How many rows each file got, and what was left out."""

    interactions: int
    pairs: int
    failed: int
    prompts: int
    cases: int
    held_out: tuple[str, ...] = ()
    left_out: int = 0
    """Episodes whose prompt a project holds out."""
    with_dependencies: int = 0
    """Components that are no prompt for rollouts: their calls need other components."""
    files: dict[str, str] = {}


def is_held_out(identifier: str, held_out: Collection[str]) -> bool:
    """Whether it is one of these nodes or below one of them."""
    return any(identifier == each or identifier.startswith(f"{each}.") for each in held_out)


def list_episodes(
    plan: ComponentPlan, journal: GenerationJournal, *, held_out: Collection[str] = ()
) -> Iterator[Episode]:
    """Every distinct answer with its verdict, of components that are not held out."""
    seen: set[tuple[str, str]] = set()
    known = {component.id for component in plan.components}
    for entry in journal.of_kind(ATTEMPT):
        answer = journal.find(ANSWER, entry["key"])
        verdict = journal.find(VERDICT, entry["submission"])
        if answer is None or verdict is None or entry["component"] not in known:
            continue
        if is_held_out(entry["component"], held_out) or (answer["prompt"], answer["text"]) in seen:
            continue
        seen.add((answer["prompt"], answer["text"]))
        prompt = journal.find(PROMPT, answer["prompt"])
        if prompt is None or not answer["text"].strip():
            continue
        cases = verdict["verdict"]["cases"]
        yield (
            answer["prompt"],
            answer["text"],
            {
                "id": entry["key"],
                "group": plan.package,
                "session": f"{plan.package}/{entry['component']}",
                "domain": f"stage {entry['stage']}",
                "stage": entry["stage"],
                "reward": 1.0 if entry["ok"] else 0.0,
                "model": answer["model"],
                "split": "train",
                "messages": prompt["messages"],
                "cases_passed": sum(not reason for reason in cases.values()),
                "cases": len(cases),
                "component": entry["component"],
                "finish_reason": answer["finish_reason"],
            },
        )


def to_rows(episodes: Collection[Episode]) -> tuple[list[dict[str, Any]], int]:
    """Rows of a log, and how many of them are pairs. A failed answer alone has the status `failed`."""
    by_prompt: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for prompt, text, row in episodes:
        by_prompt[prompt].append((text, row))
    rows, pairs = [], 0
    for group in by_prompt.values():
        passed = [(text, row) for text, row in group if row["reward"]]
        failed = [(text, row) for text, row in group if not row["reward"]]
        paired = min(len(passed), len(failed))
        pairs += paired
        for (chosen, row), (rejected, _) in zip(passed, failed, strict=False):
            rest = {key: value for key, value in row.items() if key != "messages"}
            pair = {"prompt": row["messages"], "chosen": chosen, "rejected": rejected}
            rows.append(rest | pair | {"status": PASSED})
        for text, row in (*passed[paired:], *failed[paired:]):
            messages = [*row["messages"], {"role": "assistant", "content": text}]
            rows.append({**row, "messages": messages, "status": PASSED if row["reward"] else FAILED})
    return rows, pairs


REWARDED_STAGES: tuple[Stage, ...] = (1, 2, 4)
"""Stages whose calls decide alone. Stage 3 also asks for less work, which no call shows."""


def list_cases(
    plan: ComponentPlan, journal: GenerationJournal, component: Component
) -> list[tuple[str, dict[str, Any]]]:
    """A component as one case for each stage that was asked: for evaluation, or for rollouts with rewards.

    Each comes with the hash of its prompt.
    """
    accepted = {
        entry["stage"]["stage"]: entry["stage"]["source"]
        for entry in journal.of_kind(ACCEPTED)
        if entry["stage"]["component"] == component.id
    }
    asked = {entry["stage"] for entry in journal.of_kind(ATTEMPT) if entry["component"] == component.id}
    found = []
    for stage in REWARDED_STAGES:
        before = next((accepted[each] for each in sorted(accepted, reverse=True) if each < stage), "")
        if stage != 1 and not (stage in asked and before):
            continue
        messages = write_prompt(plan, component, stage, source=before)
        calls = [
            {"call": component.function, "args": call.args, "named": call.named}
            | ({"raises": call.raises} if call.raises else {"gives": call.gives})
            for call in component.cases.calls
            if call.stage <= stage
        ]
        case = {
            "id": f"{plan.package}/{component.id}/stage-{stage}",
            "messages": [message.model_dump() for message in messages],
            "reference": f"```python\n{accepted[stage]}```" if accepted.get(stage) else "",
            "group": plan.package,
            "session": f"{plan.package}/{component.id}",
            "domain": f"stage {stage}",
            "checks": [{"python_calls": calls}],
        }
        found.append((prompt_hash(messages), case))
    return found


def dump_lines(rows: Collection[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
