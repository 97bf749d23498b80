"""Preflight and guards: whether there is anything to learn, and whether what is learned is the task. Pure.

In: the lengths of prompts, the measures of batches. Out: advice and a reason to stop, or nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.grading.rewards import RewardSpec
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case
from graftwork.train.rollouts.groups import uniform

LEAST_SIGNAL = 0.05
"""A smaller share of prompts with a difference in reward teaches nothing in a night."""
ENOUGH_PROMPTS = 32
"""Prompts without a signal after which a run stops: of fewer, all may be without one by chance."""
MOST_SOLVED = 0.95
MOST_TRUNCATED = 0.5
APART_BATCHES, APART_FROM = 3, 0.3
"""A run stops where reward exceeds audit by more than this in as many batches in a row."""
NIGHT_SECONDS = 8 * 3600
CANARY = "canary/"
MOST_NAMED = 5
"""Prompts that a message names."""
VALUE_RULES = ("exact", "contains", "numeric", "normalised", "regex", "set")
"""Checks that compare an answer with a value."""
CAUGHT = 0.5
"""A reward for a canary from which it is an alarm."""


class SignalSearch(NamedTuple):
    """How far the first batches were searched for a signal."""

    until: int = 0
    """The last batch that was looked at."""
    prompts: int = 0
    """Asked so far, without a signal."""
    found: bool = False

    def after(self, batch: int, *, prompts: int) -> "SignalSearch":
        """`prompts` without a signal; 0: this batch has one."""
        return SignalSearch(batch, self.prompts + prompts, found=not prompts)


def describe_signal(measures: Mapping[str, float], *, prompts: int, seconds: float) -> str:
    """What the first batch shows before any weight has changed. `seconds` are those of sampling and grading
    it; 0 if it was read from the journal."""
    night = f"; about {int(prompts * NIGHT_SECONDS / seconds):,} prompts in 8 hours" if seconds else ""
    return (
        f"preflight: {1 - measures['dead_groups']:.0%} of prompts carry a signal, pass@1 "
        f"{measures['pass@1']:.0%}, pass@k {measures['pass@k']:.0%}, {measures['length']:.0f} tokens an "
        f"answer, {measures['truncated']:.0%} cut, {measures['reward_seconds']:.2f} s a reward{night}"
    )


def advise(measures: Mapping[str, float]) -> str | None:
    """Why training would be wasted, and what to do; None if it can start."""
    if 1 - measures["dead_groups"] >= LEAST_SIGNAL:
        return None
    if measures["pass@1"] > MOST_SOLVED:
        return "nearly every answer is right already: nothing is left to learn; take harder prompts"
    if measures["truncated"] > MOST_TRUNCATED:
        return "most answers are cut: raise `rollouts.max_tokens`, or train on short replies first"
    if measures["pass@k"] == 0:
        return "no answer is ever right: train with `objective: sft` first, or take easier prompts"
    return "all answers to a prompt get the same reward: use a finer reward or other prompts"


def find_too_long(lengths: Mapping[str, int], *, longest_answer: int, positions: int) -> list[str]:
    """Prompts that leave no room for an answer in the positions that the base knows; UserMistake if that is
    all of them."""
    found = [name for name, length in lengths.items() if length + longest_answer > positions]
    if found and len(found) == len(lengths):
        shortest = min(found, key=lambda name: lengths[name])
        raise UserMistake(
            f"every prompt is longer than the base allows: the shortest, {shortest}, has "
            f"{lengths[shortest]:,} tokens",
            why=f"with an answer of up to {longest_answer:,} tokens it must fit {positions:,} positions",
            fix="shorten the prompts, lower `rollouts.max_tokens`, or take a base with a longer context",
            where="train.rollouts",
        )
    return found


def describe_too_long(found: Sequence[str], lengths: Mapping[str, int], *, positions: int) -> str:
    shown = ", ".join(f"{name} ({lengths[name]:,} tokens)" for name in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"prompts without room for an answer in {positions:,} positions are left out: {shown}{more}"


def make_canaries(cases: Sequence[Case], *, count: int, seed: int) -> list[Case]:
    """Prompts without a right answer: it was replaced by a secret. A reward for one is an alarm."""
    canaries = []
    for case in sorted(cases, key=lambda case: uniform(seed, "canary", case.id))[:count]:
        secret = f"secret-{uniform(seed, 'secret', case.id):.15f}"
        checks = tuple(_with_secret(check, secret) for check in case.checks)
        changed = {"id": f"{CANARY}{case.id}", "reference": secret, "checks": checks}
        canaries.append(case.model_copy(update=changed))
    return canaries


def _with_secret(check: dict[str, object], secret: str) -> dict[str, object]:
    """The check with expected values that no answer gives; of tests, one more that cannot hold."""
    rule = check.get("metric") or next((key for key in check if key in VALUE_RULES), None)
    if rule in VALUE_RULES:
        # A secret is no number, set or pattern, and no answer holds it: it has to be the answer itself.
        return {"exact": secret, **({"where": check["where"]} if "where" in check else {})}
    changed = dict(check)
    for key in ("python_calls", "calls"):
        calls = changed.get(key)
        if isinstance(calls, list):
            changed[key] = [{**call, "gives": secret, "raises": None} for call in calls]
    for key in ("python_tests", "tests"):
        if isinstance(changed.get(key), str):
            changed[key] = f"{changed[key]}\nassert False, {secret!r}\n"
    return changed


def split_checks(case: Case, *, share: float, seed: int) -> tuple[Case, Case | None]:
    """The case with the checks that reward, and with those that only audit; None if there are too few.

    Calls of one check are split too. The split depends on seed, case and check alone.
    """
    units = []
    for number, check in enumerate(case.checks):
        calls = check.get("python_calls")
        units += [(number, at) for at in range(len(calls) if isinstance(calls, list) else 1)]
    held = round(share * len(units))
    if not held or held == len(units):
        return case, None
    ordered = sorted(units, key=lambda unit: uniform(seed, "audit", case.id, *unit))
    audit = set(ordered[:held])
    return _keep_checks(case, set(units) - audit), _keep_checks(case, audit)


def _keep_checks(case: Case, kept: set[tuple[int, int]]) -> Case:
    checks: list[dict[str, object]] = []
    for number, check in enumerate(case.checks):
        calls = check.get("python_calls")
        if isinstance(calls, list):
            left = [call for at, call in enumerate(calls) if (number, at) in kept]
            if left:
                checks.append({**check, "python_calls": left})
        elif (number, 0) in kept:
            checks.append(check)
    return case.model_copy(update={"checks": tuple(checks)})


def are_apart(recent: Sequence[tuple[float, float]]) -> bool:
    """Whether reward exceeded audit by too much in each of the last batches."""
    last = recent[-APART_BATCHES:]
    return len(last) == APART_BATCHES and all(reward - audit > APART_FROM for reward, audit in last)


def uses_checks(spec: RewardSpec) -> bool:
    """Whether the rewards read the checks of a case: only then an audit half means anything."""
    return any(
        part.metric in ("task_success", "checks_passed", "code_passes", "python_tests") for part in spec.parts
    )
