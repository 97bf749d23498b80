"""The catalogue of hacks against the cases of every component, before a model is asked.

In: components. Out: hacks that some component's cases would accept. Verdicts are journaled, so that
cases that have not changed are not tried again.
"""

from collections.abc import Sequence

from graftwork.components.generate.attempts import OnProgress
from graftwork.components.generate.journal import GenerationJournal
from graftwork.components.generate.prompts import shown_calls
from graftwork.components.spec.component import Component
from graftwork.components.verify.verifier import SourceVerifier, Submission
from graftwork.grading.code import extract_code
from graftwork.grading.hacks import PROGRAMS, TEXTS
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake

HACKS = "hacks"
TRIED_TOGETHER = 4
"""Components: their hacks are one batch, and one step of progress."""


def list_hacks(component: Component) -> dict[str, str]:
    """Sources that deserve nothing, by name."""
    programs = {name: text.format(name=component.function) for name, text in PROGRAMS.items()}
    return programs | {name: extract_code(text) for name, text in TEXTS.items()} | _tailored(component)


def _tailored(component: Component) -> dict[str, str]:
    """What a model can write that looks at the shown cases and solves nothing."""
    shown = shown_calls(component, 4)
    values = [call.gives for call in shown if call.raises is None]
    if not shown:
        return {}
    common = max(values, key=values.count, default=None)
    head = f"def {component.function}(*args, **named):\n"
    table = "".join(
        f"    if list(args) == {list(call.args)!r} and named == {call.named!r}:\n        "
        + (f"raise {call.raises}\n" if call.raises else f"return {call.gives!r}\n")
        for call in shown
    )
    return {
        "the same value for everything": f"{head}    return {common!r}\n",
        "a table of the shown cases": f"{head}{table}    return {common!r}\n",
    }


def find_accepted_hacks(
    components: Sequence[Component],
    verifier: SourceVerifier,
    journal: GenerationJournal,
    *,
    on_progress: OnProgress = lambda _phase, _done, _total: None,
) -> dict[str, list[str]]:
    """Names of accepted hacks by the id of their component. No hack needs its dependencies."""
    found: dict[str, list[str]] = {}
    asked: list[tuple[Component, str, dict[str, str]]] = []
    for component in components:
        if not component.cases.calls and not component.cases.properties:
            continue
        hacks = list_hacks(component)
        content = component.model_dump(mode="json", exclude={"line"})
        key = fingerprint([content, hacks])[:24]
        known = journal.find(HACKS, key)
        if known is None:
            asked.append((component, key, hacks))
        elif known["accepted"]:
            found[component.id] = known["accepted"]
    for first in range(0, len(asked), TRIED_TOGETHER):
        on_progress("hacks", first, len(asked))
        part = asked[first : first + TRIED_TOGETHER]
        submissions = [
            Submission(component, text, 4) for component, _, hacks in part for text in hacks.values()
        ]
        verdicts = iter(verifier.verify(submissions))
        for component, key, hacks in part:
            accepted = [name for name in hacks if next(verdicts).ok]
            journal.add(HACKS, key, component=component.id, tried=len(hacks), accepted=accepted)
            if accepted:
                found[component.id] = accepted
    return found


def require_no_hack(accepted: dict[str, list[str]]) -> None:
    if accepted:
        identifier, names = next(iter(accepted.items()))
        others = ", ".join(list(accepted)[1:])
        raise UserMistake(
            f"the cases of component {identifier} accept an answer that solves nothing: {names[0]}",
            why="a model that is rewarded by these cases learns to write such answers"
            + (f"; the cases of {others} accept some too" if others else ""),
            fix="add calls with other arguments and values, or a property; `generate.hacks: false` in "
            "graft.yaml turns this check off",
            where=f"components.{identifier}",
        )
