"""The batch source of reinforcement learning: prompts → answers → verdicts → rows with advantages.

Input: prompts, a sampler over the live adapter, rewards, a journal. Output: the rows of each step and what
they measured. A batch that is in the journal is read and neither sampled nor graded again, so a killed run
repeats its steps to the same bytes.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graftwork.grading.rewards import AnswerVerdict, RewardQuestion
from graftwork.grading.settings import RANK, RewardSettings
from graftwork.records.dataset import Row
from graftwork.records.errors import NegativeResult
from graftwork.records.interaction import Origin
from graftwork.records.report import Case
from graftwork.records.run import ENVIRONMENT
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.objectives.advantages import group_advantages, is_dead
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.samples import TrainingSample, scale_policy, scale_supervised
from graftwork.train.rollouts.episodes import EpisodeJournal, SampledAnswer
from graftwork.train.rollouts.measures import (
    APART_BATCHES,
    CAUGHT,
    DECOY,
    ENOUGH_PROMPTS,
    MOST_PROMPTS_NAMED,
    SAMPLING_SECONDS,
    SOLVED,
    FailureMessages,
    PromptRecord,
    SignalSearch,
    advise,
    are_apart,
    choose_prompts,
    compare_with_audit,
    describe_extremes,
    describe_signal,
    measure_groups,
)
from graftwork.train.rollouts.sampling import MOST_APART, AskedPrompt, correct_mismatch
from graftwork.train.settings import TrainSettings


class RewardGrader(Protocol):
    def grade_all(self, questions: Sequence[RewardQuestion]) -> Iterator[AnswerVerdict]: ...

    def rank(self, metric: str, case: Case, texts: Sequence[str]) -> tuple[list[float] | None, str]: ...


class GroupRanking:
    """Judges that compare the answers to one prompt, used only if the other rewards tie. A group whose gate
    failed, or whose rewards already differ, costs no judge; a group that was ranked before a crash is not
    ranked again.
    """

    def __init__(self, rewards: Sequence[RewardSettings], judge: RewardGrader) -> None:
        self._judges = [reward for reward in rewards if reward.ranks]
        self._others = sum(abs(reward.weight) for reward in rewards if not reward.ranks)
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
            graded = [verdicts[answer.key] for answer in group]
            rewards = [verdict.reward for verdict in graded]
            ranked = [_is_ranked(verdict) for verdict in graded]
            if group[0].decoy or any(verdict.failed for verdict in graded) or all(ranked):
                continue
            is_only_reward = not self._others and None in rewards
            if not (any(ranked) or is_only_reward or (is_dead(rewards) and all(rewards))):
                continue
            # What a killed run ranked already stays; so does the 0 of an answer that was cut off.
            open_places = [
                index
                for index, verdict in enumerate(graded)
                if not _is_ranked(verdict) and (self._others or verdict.reward is None)
            ]
            case, weight = prompts[prompt][0], self._others
            for judge in self._judges:
                grades, failed = self._judge.rank(judge.metric, case, [answer.text for answer in group])
                if grades is None:
                    report(f"the reward {judge.metric} could not rank the answers to {prompt}: {failed}")
                    continue
                for index in open_places:
                    grade = grades[index]
                    # `weight` is that of everything that is in the reward already.
                    total = weight * (graded[index].reward or 0.0) + judge.weight * grade
                    parts = {**graded[index].parts, judge.metric: grade}
                    reward = total / (weight + abs(judge.weight))
                    graded[index] = graded[index].model_copy(update={"reward": reward, "parts": parts})
                weight += abs(judge.weight)
            yield from (graded[index] for index in open_places if _is_ranked(graded[index]))


def _is_ranked(verdict: AnswerVerdict) -> bool:
    return any(name.startswith(RANK) for name in verdict.parts)


class AnswerSampler(Protocol):
    def sample(
        self, batch: int, prompts: Sequence[AskedPrompt], *, progress: Callable[[], None] = ...
    ) -> list[SampledAnswer]: ...


ReferenceValues = Callable[[Sequence[TrainingSample]], list[tuple[float, ...]]]
"""Log-probabilities of rows: by the model that training started from, or by the model as it is now."""


@dataclass(eq=False)
class RolloutSource(TrainingCallback):
    """A batch source, and the callback that saves the record of its prompts in checkpoints."""

    name = "rollouts"

    settings: TrainSettings
    prompts: Mapping[str, tuple[Case, list[int]]]
    """Cases with the tokens of their prompts, by id."""
    sampler: AnswerSampler
    grader: RewardGrader
    journal: EpisodeJournal
    reference: ReferenceValues | None = None
    now: ReferenceValues | None = None
    """Set if another sampler than the model in training generates the answers."""
    supervised: Sequence[Row] = ()
    audit: Mapping[str, Case] = field(default_factory=dict)
    """Cases with the checks that never reward, by id."""
    report: Callable[[str], None] = lambda _message: None
    progress: Callable[[str], None] = lambda _doing: None

    def __post_init__(self) -> None:
        self._rollouts = self.settings.rollouts
        self._history: dict[str, PromptRecord] = {}
        self._until = self._watched = 0
        self._held: tuple[int, list[list[tuple[SampledAnswer, AnswerVerdict]]]] | None = None
        self._measures: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._has_signal = True
        self._looked = SignalSearch()
        self._has_sampled = False
        self._recent: list[tuple[float, float]] = []
        self._epochs: EpochOrder | None = None
        if self.settings.mix.sft:
            self._epochs = EpochOrder(self.supervised, settings=self.settings)

    @property
    def steps(self) -> int:
        return self._rollouts.steps * self._rollouts.updates

    def rows_before(self, step: int) -> int:
        return step * self._rollouts.prompts * self._rollouts.num_generations

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name, (case, tokens) in sorted(self.prompts.items()):
            digest.update(repr((name, tokens, case.reference, case.checks)).encode())
        return {"steps": self.steps, "prompts": digest.hexdigest()[:16]}

    def peek(self, step: int) -> Sequence[Row]:
        return ()

    def measures(self, step: int) -> dict[str, float]:
        return dict(self._measures)

    def batch(self, step: int) -> Sequence[Row]:
        number = (step - 1) // self._rollouts.updates + 1
        started_at = time.perf_counter()
        groups = self._groups(number)
        self._require_verdicts(number, groups)
        self._measures = measure_groups(groups) | self._seconds
        if self._seconds:
            self.report(f"batch {number}: {describe_extremes(groups)}")
            self._seconds = {}
        self._watch(number, groups, seconds=time.perf_counter() - started_at)
        live = [group for group in groups if not is_dead([verdict.reward for _, verdict in group])]
        live = [group for group in live if not group[0][0].decoy]
        groups = [group for group in groups if not group[0][0].decoy]
        groups = [group for group in groups if any(verdict.reward is not None for _, verdict in group)]
        rl, sft = self.settings.mix.shares(step, self.steps)
        self._has_signal = bool(live) or (self._epochs is not None and sft > 0)
        rows = [row for group in live or groups[:1] for row in self._samples(number, group)]
        rows = self._correct(rows, number)
        if self.reference is not None and rows:
            # The start's log-probabilities: of every row where KL is in the loss, else of one row a group.
            first = {row.unit: row for row in reversed(rows)}
            compared = rows if self.settings.policy.kl else list(first.values())
            values = dict(zip([row.id for row in compared], self.reference(compared), strict=True))
            rows = [row.model_copy(update={"reference": values.get(row.id)}) for row in rows]
        scaled: list[TrainingSample] = scale_policy(
            rows,
            how=self.settings.policy.normalize,
            max_tokens=self._rollouts.longest_answer,
            share=rl if live else 0.0,
        )
        if self._epochs is not None and sft:
            supervised = self._epochs.batch((step - 1) % self._epochs.steps + 1)
            scaled += scale_supervised(supervised, unit="sft", share=sft)
            self._measures |= {"share_rl": rl, "share_sft": sft}
        return scaled

    def _require_verdicts(
        self, number: int, groups: Sequence[Sequence[tuple[SampledAnswer, AnswerVerdict]]]
    ) -> None:
        """Stop if no answer of a batch could be graded: there is nothing to train on."""
        graded = [verdict for group in groups for answer, verdict in group if not answer.decoy]
        if any(verdict.reward is not None for verdict in graded):
            return
        failed = (
            f"the reward {metric} failed on the answer {verdict.key}: {why}"
            for verdict in graded
            for metric, why in verdict.failed.items()
        )
        names = ", ".join(reward.metric for reward in self.settings.rewards)
        prompts = ", ".join(group[0][0].prompt for group in groups[:MOST_PROMPTS_NAMED])
        raise NegativeResult(
            f"no answer of batch {number} could be graded",
            why=next(failed, f"{names} gave no grade to any answer to {prompts}"),
            fix="run `graft reward check`, and fix or remove the reward that fails",
            where="train.rewards",
        )

    def accept_gradient(self, number: int, measured: Any, rows: Sequence[Row]) -> bool:
        """A batch without any difference in reward and without supervised rows changes no weight."""
        return self._has_signal

    def state(self) -> dict[str, Any]:
        record = {name: [prompt.answers, prompt.solved] for name, prompt in self._history.items()}
        watched = {"recent": self._recent, "watched": self._watched, "looked": list(self._looked)}
        return {"until": self._until, "prompts": record, **watched}

    def restore(self, state: dict[str, Any]) -> None:
        self._until = int(state.get("until", 0))
        self._watched = int(state.get("watched", 0))
        self._recent = [(reward, audit) for reward, audit in state.get("recent", ())]
        self._looked = SignalSearch(*state.get("looked", ()))
        self._history = {name: PromptRecord(*values) for name, values in state.get("prompts", {}).items()}

    def _watch(
        self, number: int, groups: Sequence[Sequence[tuple[SampledAnswer, AnswerVerdict]]], *, seconds: float
    ) -> None:
        """Stop before training without a signal, on a reward that pays for the impossible, or on one that
        diverges from its audit.
        """
        checks = self.settings.reward_checks
        for answer, verdict in (pair for group in groups for pair in group):
            if answer.decoy and (verdict.reward or 0.0) >= CAUGHT:
                raise NegativeResult(
                    f"the decoy {answer.key} of batch {number} was rewarded with {verdict.reward:.2f}",
                    why="no answer to it can be right: the reward is for something else",
                    fix="read the answer in the run's episodes and fix the reward; if it rewards style, "
                    "set `train.reward_checks.decoys: 0`",
                    where="train.rewards",
                )
        if checks.preflight:
            self._look_for_signal(number, seconds=seconds)
        compared = compare_with_audit(groups)
        if number > self._watched and compared is not None:
            self._watched = number
            self._recent = [*self._recent, compared][-APART_BATCHES:]
            if are_apart(self._recent):
                raise NegativeResult(
                    f"reward and audit have diverged since batch {number - APART_BATCHES + 1}",
                    why="answers get better by the checks that reward and not by those that only audit",
                    fix="the adapter of the last checkpoint before that is in the run's folder; add checks",
                    where="train.rewards",
                )

    def _look_for_signal(self, number: int, *, seconds: float) -> None:
        """Report the first batch, and stop if enough prompts carry no signal."""
        if self._looked.found or number <= self._looked.until:
            return
        spent = seconds if self._has_sampled else 0.0
        described = describe_signal(self._measures, prompts=self._rollouts.prompts, seconds=spent)
        if number == 1:
            self.report(described)
        prompt_count = sum(not name.startswith(DECOY) for name in self.prompts)
        advice = advise(self._measures)
        self._looked = self._looked.after(number, prompts=0 if advice is None else self._rollouts.prompts)
        if advice is None:
            return
        enough = min(ENOUGH_PROMPTS, prompt_count)
        if self._looked.prompts >= enough or number == self._rollouts.steps:
            raise NegativeResult(
                "there is nothing to learn from these prompts",
                why=described,
                fix=advice,
                where="train.rollouts",
            )
        self.report(
            f"hardly any of {self._looked.prompts} prompts carries a signal: the run stops if that holds "
            f"for {enough}"
        )

    def _groups(self, number: int) -> list[list[tuple[SampledAnswer, AnswerVerdict]]]:
        if self._held is not None and self._held[0] == number:
            return self._held[1]
        answers = self.journal.answers(number)
        started_at = time.perf_counter()
        if answers is None:
            self.progress("rollouts")
            names = choose_prompts(
                [name for name in self.prompts if not name.startswith(DECOY)],
                self._history,
                count=self._rollouts.prompts,
                seed=self.settings.seed,
                batch=number,
            )
            prompts = [AskedPrompt(name, self.prompts[name][1]) for name in names]
            if number == 1:
                decoys = (name for name in self.prompts if name.startswith(DECOY))
                prompts += [AskedPrompt(name, self.prompts[name][1], decoy=True) for name in decoys]
            answers = self.sampler.sample(number, prompts, progress=lambda: self.progress("rollouts"))
            self.journal.write_answers(number, answers)
            self._has_sampled = True
        sampled = time.perf_counter()
        verdicts = self._grade(number, answers)
        spent = (sampled - started_at, time.perf_counter() - sampled)
        self._seconds = dict(zip(SAMPLING_SECONDS, spent, strict=True))
        groups: dict[str, list[tuple[SampledAnswer, AnswerVerdict]]] = {}
        for answer in answers:
            groups.setdefault(answer.prompt, []).append((answer, verdicts[answer.key]))
        self._held = number, list(groups.values())
        if number > self._until:
            self._until = number
            for answer in answers:
                if answer.decoy:
                    continue
                record = self._history.setdefault(answer.prompt, PromptRecord())
                reward = verdicts[answer.key].reward
                if reward is not None:
                    record.answers += 1
                    record.solved += reward >= SOLVED
        return self._held[1]

    def _grade(self, number: int, answers: Sequence[SampledAnswer]) -> dict[str, AnswerVerdict]:
        """The verdict of each answer; those in the journal are not requested again."""
        verdicts = self.journal.verdicts(number)
        if len(verdicts) == len(answers) and all(verdict.failed for verdict in verdicts.values()):
            # The run stopped here, as with a judge that is down: a run that is resumed asks it again.
            verdicts = {}
        missing = [answer for answer in answers if answer.key not in verdicts]
        questions = [_question(answer, self.prompts[answer.prompt][0]) for answer in missing]
        # The grades by the checks that never reward.
        audited = [
            _question(answer, case)
            for answer in missing
            if (case := self.audit.get(answer.prompt)) is not None
        ]
        audits = {graded.key: graded.reward for graded in self.grader.grade_all(audited)}
        failures = FailureMessages(number, self.report)
        for graded in self.grader.grade_all(questions):
            self.progress("rewards")
            verdict = graded.model_copy(update={"audit": audits.get(graded.key)})
            self.journal.write_verdict(number, verdict, last=graded.key == missing[-1].key)
            verdicts[graded.key] = verdict
            for metric, why in graded.failed.items():
                failures.add(metric, why, graded.key)
        failures.report_rest()
        ranking = GroupRanking(self.settings.rewards, self.grader)
        for changed in ranking.break_ties(answers, verdicts, self.prompts, report=self.report):
            self.progress("rewards")
            self.journal.write_verdict(number, changed, last=True)
            verdicts[changed.key] = changed
        return verdicts

    def _samples(
        self, number: int, group: Sequence[tuple[SampledAnswer, AnswerVerdict]]
    ) -> list[TrainingSample]:
        rewards = [verdict.reward for _, verdict in group]
        advantages = group_advantages(rewards, scale=self.settings.policy.scale_rewards)
        case, prompt = self.prompts[group[0][0].prompt]
        off_policy = self._rollouts.updates > 1
        return [
            TrainingSample.model_construct(
                id=f"{number}/{answer.key}",
                origin=Origin(file=case.origin.file, line=case.origin.line),
                messages=case.messages,
                reply=answer.text,
                tokens=(*prompt, *answer.tokens),
                trained_from=len(prompt),
                unit=f"{number}/{answer.prompt}",
                part="rl",
                advantage=advantage,
                sampled=answer.logprobs if off_policy else None,
                factors=tuple(map(float, answer.written)) if answer.given else None,
            )
            for (answer, _), advantage in zip(group, advantages, strict=True)
            if advantage is not None
        ]

    def _correct(self, rows: list[TrainingSample], number: int) -> list[TrainingSample]:
        """If another sampler generated the answers: weight tokens by the ratio of probabilities."""
        if self.now is None or self._rollouts.endpoint is None or not rows:
            return rows
        answers = self.journal.answers(number) or []
        sampled = {f"{number}/{answer.key}": answer.logprobs for answer in answers}
        corrected, measures = correct_mismatch(
            rows, [sampled[row.id] for row in rows], self.now(rows), most=MOST_APART
        )
        self._measures |= measures
        return corrected


def _question(answer: SampledAnswer, case: Case) -> RewardQuestion:
    evidence: dict[str, Any] = {}
    if answer.turns:
        # What a reward may know of an episode besides its last reply.
        turns = [turn.model_dump() for turn in answer.turns]
        episode = {"reward": answer.environment_reward, "failed": answer.failed}
        evidence = {ENVIRONMENT: episode, "turns": turns}
    return RewardQuestion(answer.key, case, answer.text, truncated=answer.truncated, evidence=evidence)
