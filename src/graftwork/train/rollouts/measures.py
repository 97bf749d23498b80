"""Evaluate sampled answers: the next prompts, measures of a batch, advice before training, when to stop.

Input: rewards, lengths, checks of cases. Output: prompts, measures by name, messages, and the guards against
a reward that is not the task: decoys and checks held back to audit. Pure.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from graftwork.grading.rewards import AnswerVerdict, RewardSpec
from graftwork.records.errors import UserError
from graftwork.records.report import Case
from graftwork.text.wording import truncate
from graftwork.train.objectives.advantages import is_dead
from graftwork.train.rollouts.episodes import SampledAnswer

MOST_UNCERTAIN = 0.25
"""p(1 − p) at p = ½: the weight of a prompt that was never asked."""
SOLVED = 0.999
"""A reward from which an answer counts as solved."""


@dataclass
class PromptRecord:
    """How often a prompt was answered, and solved."""

    answers: int = 0
    solved: float = 0.0

    @property
    def weight(self) -> float:
        """p(1 − p) of the share solved, smoothed so that no prompt is dropped permanently."""
        if not self.answers:
            return MOST_UNCERTAIN
        share = (self.solved + 0.5) / (self.answers + 1)
        return share * (1 - share)


def choose_prompts(
    prompts: Sequence[str], history: Mapping[str, PromptRecord], *, count: int, seed: int, batch: int
) -> list[str]:
    """`count` different prompts, drawn by their weights; the draw depends only on seed, batch and prompt."""
    empty = PromptRecord()

    def key(prompt: str) -> float:
        weight = history.get(prompt, empty).weight
        return math.log(weight) - math.log(-math.log(uniform(seed, batch, prompt)))

    return sorted(prompts, key=key, reverse=True)[:count]


def pass_rates(groups: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """The share of answers solved (pass@1), and of groups with a solved answer (pass@k)."""
    solved = [[reward is not None and reward >= SOLVED for reward in group] for group in groups]
    answers = [is_solved for group in solved for is_solved in group]
    if not answers:
        return 0.0, 0.0
    return fmean(answers), fmean([any(group) for group in solved])


def uniform(*parts: object) -> float:
    """A number strictly between 0 and 1 that depends only on the parts."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return (int.from_bytes(digest[:6]) + 0.5) / 2**48


def seed_of(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:6])


GradedAnswer = tuple[SampledAnswer, AnswerVerdict]
SAMPLING_SECONDS = ("rollout_seconds", "grading_seconds")
"""Measures of a batch: seconds of sampling its answers, and of their rewards."""
MOST_NAMED = 3
"""Number of answers that messages about a failing reward name."""
MOST_SHOWN = 160
"""Characters of an answer in a message."""


def measure_groups(groups: Sequence[Sequence[GradedAnswer]]) -> dict[str, float]:
    """Metrics of a batch of rollouts, by name. Decoys do not count."""
    counted = [group for group in groups if not group[0][0].decoy]
    pairs = [pair for group in counted for pair in group]
    rewards = [verdict.reward for _, verdict in pairs if verdict.reward is not None]
    measures: dict[str, float] = {}
    if not pairs:
        return measures
    by_group = [[verdict.reward for _, verdict in group] for group in counted]
    measures["reward"] = fmean(rewards) if rewards else 0.0
    for metric in sorted({name for _, verdict in pairs for name in verdict.parts}):
        values = [value for _, verdict in pairs if (value := verdict.parts.get(metric)) is not None]
        if values:
            measures[f"reward/{metric}"] = fmean(values)
    audits = [verdict.audit for _, verdict in pairs if verdict.audit is not None]
    if audits:
        measures["audit"] = fmean(audits)
    measures["pass@1"], measures["pass@k"] = pass_rates(by_group)
    measures["dead_groups"] = fmean([is_dead(group) for group in by_group])
    measures["length"] = fmean([sum(answer.written) for answer, _ in pairs])
    measures["truncated"] = fmean([answer.truncated for answer, _ in pairs])
    logprobs = [
        value
        for answer, _ in pairs
        for value, is_own in zip(answer.logprobs, answer.written, strict=False)
        if is_own
    ]
    if any(answer.turns for answer, _ in pairs):
        replies = [sum(turn.by == "model" for turn in answer.turns) for answer, _ in pairs]
        measures["turns"] = fmean(replies)
        measures["failed_episodes"] = float(sum(bool(answer.failed) for answer, _ in pairs))
    if logprobs:
        measures["entropy"] = -fmean(logprobs)
    measures["failed_rewards"] = float(sum(bool(verdict.failed) for _, verdict in pairs))
    measures["reward_seconds"] = fmean([verdict.seconds for _, verdict in pairs])
    for metric in sorted({name for _, verdict in pairs for name in verdict.part_seconds}):
        took = [seconds for _, verdict in pairs if (seconds := verdict.part_seconds.get(metric)) is not None]
        measures[f"seconds/{metric}"] = fmean(took)
    return measures


def compare_with_audit(groups: Sequence[Sequence[GradedAnswer]]) -> tuple[float, float] | None:
    """Mean reward and mean audit of the answers that have both; None without any. Decoys do not count."""
    audited = [
        (verdict.reward, verdict.audit)
        for group in groups
        for answer, verdict in group
        if not answer.decoy and verdict.reward is not None and verdict.audit is not None
    ]
    if not audited:
        return None
    return fmean([reward for reward, _ in audited]), fmean([audit for _, audit in audited])


def find_extremes(groups: Sequence[Sequence[GradedAnswer]]) -> tuple[GradedAnswer, GradedAnswer] | None:
    """The best and the worst answer of a batch; the shortest on a tie. Decoys do not count."""
    graded = [pair for group in groups for pair in group if pair[1].reward is not None and not pair[0].decoy]
    if not graded:
        return None
    best = max(graded, key=lambda pair: (pair[1].reward or 0.0, -len(pair[0].tokens)))
    worst = min(graded, key=lambda pair: (pair[1].reward or 0.0, len(pair[0].tokens)))
    return best, worst


def describe_extremes(groups: Sequence[Sequence[GradedAnswer]]) -> str:
    """The best and the worst answer of a batch on one line, for logs."""
    extremes = find_extremes(groups)
    if extremes is None:
        return "no answer was graded"
    lines = []
    for answer, verdict in extremes:
        lines.append(f"{verdict.reward:.2f} {answer.prompt} {truncate(answer.text, MOST_SHOWN)!r}")
    return f"best {lines[0]}; worst {lines[1]}"


class FailureMessages:
    """Names the first answers of a batch on which a reward failed for one reason, and counts the rest."""

    def __init__(self, batch: int, report: Callable[[str], None]) -> None:
        self._batch, self._report = batch, report
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, metric: str, why: str, answer: str) -> None:
        self._counts[metric, why] += 1
        if self._counts[metric, why] <= MOST_NAMED:
            self._report(f"the reward {metric} failed on the answer {answer} of batch {self._batch}: {why}")

    def report_rest(self) -> None:
        for (metric, why), count in self._counts.items():
            if count > MOST_NAMED:
                further = count - MOST_NAMED
                self._report(
                    f"the reward {metric} failed on {further} more answer{'s' * (further > 1)} of batch "
                    f"{self._batch}: {why}"
                )


LEAST_SIGNAL = 0.05
"""With a smaller share of prompts with different rewards, training learns nothing in a night."""
ENOUGH_PROMPTS = 32
"""Prompts without a signal after which a run stops: fewer may all be without one by chance."""
MOST_SOLVED = 0.95
MOST_TRUNCATED = 0.5
APART_BATCHES, APART_FROM = 3, 0.3
"""A run stops if reward exceeds audit by more than this in this many batches in a row."""
NIGHT_SECONDS = 8 * 3600
DECOY = "decoy/"
MOST_PROMPTS_NAMED = 5
"""Prompts that a message names."""
VALUE_RULES = ("exact", "contains", "numeric", "normalised", "regex", "set")
"""Checks that compare an answer with a value."""
CAUGHT = 0.5
"""A reward for a decoy from which it is an alarm."""


class SignalSearch(NamedTuple):
    """Progress of the search for a signal in the first batches."""

    until: int = 0
    """The last batch that was checked."""
    prompts: int = 0
    """Asked so far, without a signal."""
    found: bool = False

    def after(self, batch: int, *, prompts: int) -> "SignalSearch":
        """State after a batch: `prompts` without a signal; 0 if this batch has one."""
        return SignalSearch(batch, self.prompts + prompts, found=not prompts)


def describe_signal(measures: Mapping[str, float], *, prompts: int, seconds: float) -> str:
    """What the first batch shows before any weight has changed. `seconds` are those of sampling and grading
    it; 0 if it was read from the journal."""
    night = f"; about {int(prompts * NIGHT_SECONDS / seconds):,} prompts in 8 hours" if seconds else ""
    return (
        f"preflight: {1 - measures['dead_groups']:.0%} of prompts carry a signal, pass@1 "
        f"{measures['pass@1']:.0%}, pass@k {measures['pass@k']:.0%}, {measures['length']:.0f} "
        f"tokens per answer, {measures['truncated']:.0%} cut, {measures['reward_seconds']:.2f} s "
        f"a reward{night}"
    )


def advise(measures: Mapping[str, float]) -> str | None:
    """Why training would be wasted, and what to do; None if it can start."""
    if 1 - measures["dead_groups"] >= LEAST_SIGNAL:
        return None
    if measures["pass@1"] > MOST_SOLVED:
        return "nearly every answer is right already: nothing is left to learn; use harder prompts"
    if measures["truncated"] > MOST_TRUNCATED:
        return "most answers are cut: raise `rollouts.max_completion_length`, or train on short replies first"
    if measures["pass@k"] == 0:
        return "no answer is ever right: train with `objective: sft` first, or take easier prompts"
    return "all answers to a prompt get the same reward: use a finer reward or other prompts"


def find_too_long(lengths: Mapping[str, int], *, longest_answer: int, positions: int) -> list[str]:
    """Prompts that leave no room for an answer in the base's context; UserError if all are too long."""
    too_long = [name for name, length in lengths.items() if length + longest_answer > positions]
    if too_long and len(too_long) == len(lengths):
        shortest = min(too_long, key=lambda name: lengths[name])
        raise UserError(
            f"every prompt is longer than the base allows: the shortest, {shortest}, has "
            f"{lengths[shortest]:,} tokens",
            why=f"with an answer of up to {longest_answer:,} tokens it must fit {positions:,} positions",
            fix="shorten the prompts, lower `rollouts.max_completion_length`, "
            "or use a base with a longer context",
            where="train.rollouts",
        )
    return too_long


def describe_too_long(too_long: Sequence[str], lengths: Mapping[str, int], *, positions: int) -> str:
    examples = ", ".join(f"{name} ({lengths[name]:,} tokens)" for name in too_long[:MOST_PROMPTS_NAMED])
    remainder = (
        f" and {len(too_long) - MOST_PROMPTS_NAMED} more" if len(too_long) > MOST_PROMPTS_NAMED else ""
    )
    return (
        f"prompts without room for an answer in {positions:,} positions are left out: {examples}{remainder}"
    )


def make_decoys(cases: Sequence[Case], *, count: int, seed: int) -> list[Case]:
    """Unsolvable prompts, whose correct answer was replaced by a secret. A reward for one raises an alarm."""
    decoys = []
    for case in sorted(cases, key=lambda case: uniform(seed, "decoy", case.id))[:count]:
        secret = f"secret-{uniform(seed, 'secret', case.id):.15f}"
        checks = tuple(_with_secret(check, secret) for check in case.checks)
        changed = {"id": f"{DECOY}{case.id}", "reference": secret, "checks": checks}
        decoys.append(case.model_copy(update=changed))
    return decoys


def _with_secret(check: dict[str, object], secret: str) -> dict[str, object]:
    """The check with expected values that no answer gives; for tests, an additional one that always fails."""
    rule = check.get("metric") or next((key for key in check if key in VALUE_RULES), None)
    if rule in VALUE_RULES:
        # A secret is not a number, set or pattern, and no answer holds it: it has to be the answer itself.
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

    Calls of one check are split too. The split depends only on seed, case and check.
    """
    units = []
    for number, check in enumerate(case.checks):
        calls = check.get("python_calls")
        units += [(number, index) for index in range(len(calls) if isinstance(calls, list) else 1)]
    audit_size = round(share * len(units))
    if not audit_size or audit_size == len(units):
        return case, None
    ordered = sorted(units, key=lambda unit: uniform(seed, "audit", case.id, *unit))
    audit = set(ordered[:audit_size])
    return _keep_checks(case, set(units) - audit), _keep_checks(case, audit)


def _keep_checks(case: Case, units: set[tuple[int, int]]) -> Case:
    checks: list[dict[str, object]] = []
    for number, check in enumerate(case.checks):
        calls = check.get("python_calls")
        if isinstance(calls, list):
            remaining = [call for index, call in enumerate(calls) if (number, index) in units]
            if remaining:
                checks.append({**check, "python_calls": remaining})
        elif (number, 0) in units:
            checks.append(check)
    return case.model_copy(update={"checks": tuple(checks)})


def are_apart(recent: Sequence[tuple[float, float]]) -> bool:
    """Whether reward exceeded audit by too much in each of the last batches."""
    last = recent[-APART_BATCHES:]
    return len(last) == APART_BATCHES and all(reward - audit > APART_FROM for reward, audit in last)


def uses_checks(spec: RewardSpec) -> bool:
    """Whether the rewards read the checks of a case: otherwise an audit half is meaningless."""
    return any(
        part.metric in ("task_success", "checks_passed", "code_passes", "python_tests") for part in spec.parts
    )
