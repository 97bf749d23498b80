"""Judges that compare the answers to one prompt: asked only where the other rewards tie.

In: answers and their verdicts. Out: verdicts with another reward. A group whose gate failed, or whose rewards
differ already, costs no judge; a group that was ranked before a crash is not ranked again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from graftwork.grading.reward_runner import RankedGroup
from graftwork.grading.rewards import RANK
from graftwork.records.report import Case
from graftwork.train.objective_settings import RewardSettings
from graftwork.train.rollouts.episodes import AnswerVerdict, SampledAnswer
from graftwork.train.rollouts.groups import is_dead


class GroupJudge(Protocol):
    def rank(self, metric: str, case: Case, texts: Sequence[str]) -> RankedGroup: ...


class GroupRanking:
    def __init__(self, rewards: Sequence[RewardSettings], judge: GroupJudge) -> None:
        self._judges = [reward for reward in rewards if reward.metric.startswith(RANK)]
        self._others = sum(abs(reward.weight) for reward in rewards if not reward.metric.startswith(RANK))
        self._judge = judge

    def break_ties(
        self,
        answers: Sequence[SampledAnswer],
        verdicts: Mapping[str, AnswerVerdict],
        prompts: Mapping[str, tuple[Case, list[int]]],
        *,
        report: Callable[[str], None],
    ) -> Iterator[AnswerVerdict]:
        """The verdicts that change."""
        if not self._judges:
            return
        groups: dict[str, list[SampledAnswer]] = {}
        for answer in answers:
            groups.setdefault(answer.prompt, []).append(answer)
        for prompt, group in groups.items():
            known = [verdicts[answer.key] for answer in group]
            if group[0].canary or not self._is_asked(known):
                continue
            # What a killed run ranked already stays; so does the 0 of an answer that was cut off.
            open_places = [
                at
                for at, verdict in enumerate(known)
                if not _is_ranked(verdict) and (self._others or verdict.reward is None)
            ]
            case, weight = prompts[prompt][0], self._others
            for judge in self._judges:
                found = self._judge.rank(judge.metric, case, [answer.text for answer in group])
                if found.grades is None:
                    report(
                        f"the reward {judge.metric} could not rank the answers to {prompt}: {found.failed}"
                    )
                    continue
                for at in open_places:
                    known[at] = _add(known[at], judge, found.grades[at], weight=weight)
                weight += abs(judge.weight)
            yield from (known[at] for at in open_places if _is_ranked(known[at]))

    def _is_asked(self, verdicts: Sequence[AnswerVerdict]) -> bool:
        if any(verdict.failed for verdict in verdicts) or all(_is_ranked(verdict) for verdict in verdicts):
            return False
        if any(_is_ranked(verdict) for verdict in verdicts):
            return True
        rewards = [verdict.reward for verdict in verdicts]
        alone = not self._others and any(reward is None for reward in rewards)
        return alone or (is_dead(rewards) and all(reward for reward in rewards))


def _add(verdict: AnswerVerdict, judge: RewardSettings, grade: float, *, weight: float) -> AnswerVerdict:
    """`weight` is that of everything that is in the reward already."""
    before = verdict.reward or 0.0
    reward = (weight * before + judge.weight * grade) / (weight + abs(judge.weight))
    return verdict.model_copy(update={"reward": reward, "parts": {**verdict.parts, judge.metric: grade}})


def _is_ranked(verdict: AnswerVerdict) -> bool:
    return any(name.startswith(RANK) for name in verdict.parts)
