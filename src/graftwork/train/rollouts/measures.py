"""What a batch of rollouts shows: rewards by part, dead groups, lengths, costs, best and worst. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from graftwork.train.rollouts.episodes import AnswerVerdict, SampledAnswer
from graftwork.train.rollouts.groups import is_dead, pass_rates

GradedAnswer = tuple[SampledAnswer, AnswerVerdict]
SAMPLING_SECONDS = ("rollout_seconds", "grading_seconds")
"""Measures of a batch: seconds of sampling its answers, and of their rewards."""
MOST_NAMED = 3
"""Answers that messages about a failing reward name."""
MOST_SHOWN = 160
"""Characters of an answer in a message."""


def measure_groups(groups: Sequence[Sequence[GradedAnswer]]) -> dict[str, float]:
    """What a batch of rollouts shows, by name. Canaries do not count."""
    counted = [group for group in groups if not group[0][0].canary]
    pairs = [pair for group in counted for pair in group]
    rewards = [verdict.reward for _, verdict in pairs if verdict.reward is not None]
    found: dict[str, float] = {}
    if not pairs:
        return found
    by_group = [[verdict.reward for _, verdict in group] for group in counted]
    found["reward"] = fmean(rewards) if rewards else 0.0
    for metric in sorted({name for _, verdict in pairs for name in verdict.parts}):
        values = [value for _, verdict in pairs if (value := verdict.parts.get(metric)) is not None]
        if values:
            found[f"reward/{metric}"] = fmean(values)
    audits = [verdict.audit for _, verdict in pairs if verdict.audit is not None]
    if audits:
        found["audit"] = fmean(audits)
    found["pass@1"], found["pass@k"] = pass_rates(by_group)
    found["dead_groups"] = fmean([is_dead(group) for group in by_group])
    found["length"] = fmean([sum(answer.written) for answer, _ in pairs])
    found["truncated"] = fmean([answer.truncated for answer, _ in pairs])
    logprobs = [
        value
        for answer, _ in pairs
        for value, is_own in zip(answer.logprobs, answer.written, strict=False)
        if is_own
    ]
    if any(answer.turns for answer, _ in pairs):
        replies = [sum(turn.by == "model" for turn in answer.turns) for answer, _ in pairs]
        found["turns"] = fmean(replies)
        found["failed_episodes"] = float(sum(bool(answer.failed) for answer, _ in pairs))
    if logprobs:
        found["entropy"] = -fmean(logprobs)
    found["failed_rewards"] = float(sum(bool(verdict.failed) for _, verdict in pairs))
    found["reward_seconds"] = fmean([verdict.seconds for _, verdict in pairs])
    for metric in sorted({name for _, verdict in pairs for name in verdict.part_seconds}):
        took = [seconds for _, verdict in pairs if (seconds := verdict.part_seconds.get(metric)) is not None]
        found[f"seconds/{metric}"] = fmean(took)
    return found


def compare_with_audit(groups: Sequence[Sequence[GradedAnswer]]) -> tuple[float, float] | None:
    """Mean reward and mean audit of the answers that have both; None without any. Canaries do not count."""
    found = [
        (verdict.reward, verdict.audit)
        for group in groups
        for answer, verdict in group
        if not answer.canary and verdict.reward is not None and verdict.audit is not None
    ]
    if not found:
        return None
    return fmean([reward for reward, _ in found]), fmean([audit for _, audit in found])


def find_extremes(groups: Sequence[Sequence[GradedAnswer]]) -> tuple[GradedAnswer, GradedAnswer] | None:
    """The best and the worst answer of a batch; of equals the shortest. Canaries do not count."""
    known = [pair for group in groups for pair in group if pair[1].reward is not None and not pair[0].canary]
    if not known:
        return None
    best = max(known, key=lambda pair: (pair[1].reward or 0.0, -len(pair[0].tokens)))
    worst = min(known, key=lambda pair: (pair[1].reward or 0.0, len(pair[0].tokens)))
    return best, worst


def describe_extremes(groups: Sequence[Sequence[GradedAnswer]]) -> str:
    """The best and the worst answer of a batch on one line, for logs."""
    found = find_extremes(groups)
    if found is None:
        return "no answer was graded"
    lines = []
    for answer, verdict in found:
        text = answer.text if len(answer.text) <= MOST_SHOWN else f"{answer.text[: MOST_SHOWN - 1]}…"
        lines.append(f"{verdict.reward:.2f} {answer.prompt} {text!r}")
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
                more = count - MOST_NAMED
                self._report(
                    f"the reward {metric} failed on {more} more answer{'s' * (more > 1)} of batch "
                    f"{self._batch}: {why}"
                )
