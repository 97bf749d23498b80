"""Many answers judged, side by side, within a budget, each question asked once.

In: cases and what one or two subjects said. Out: verdicts and marks. A question that has no clear reply,
or for which no budget is left, is told as unjudged; the run ends in order and a later one goes on where
it stopped. Knows neither files nor HTTP by itself.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol, TypeVar

from graftwork.evaluate.judge.budget import Budget, BudgetSpent, Spent
from graftwork.evaluate.judge.client import ChatClient, Said, Unanswered
from graftwork.evaluate.judge.settings import JudgeSettings
from graftwork.evaluate.judge.store import ReplyStore, key_of
from graftwork.evaluate.judge.tally import PairVerdict
from graftwork.evaluate.judge.wording import (
    Chat,
    Choice,
    UnclearReply,
    ask_again,
    ask_mark,
    ask_pair,
    read_mark,
    read_pair,
)
from graftwork.grading.interface import CannotGrade
from graftwork.records.report import Case

Reading = TypeVar("Reading")
Progress = Callable[[int, int], None]
GIVE_UP_AFTER = 5
"""So many questions in a row without any reply: the judge is away, and asking on would only cost time."""
_FAILURES = (UnclearReply, Unanswered, BudgetSpent)


class Speaker(Protocol):
    """Whoever answers a chat: the endpoint, or a stand-in."""

    def say(self, chat: Chat) -> Said: ...


class Judge:
    """One judge for one evaluation. `rate` makes it a Rater for the metric judge_score."""

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        speaker: Speaker,
        replies: ReplyStore,
        budget: Budget | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._settings = settings
        self._speaker = speaker
        self._replies = replies
        self._budget = budget or Budget(settings)
        self._stopping = stopping or threading.Event()
        self._unanswered = 0

    @property
    def spent(self) -> Spent:
        return self._budget.spent()

    def rate(self, case: Case, text: str) -> float:
        """The mark of one answer, 1 to 5 as 0 to 1; CannotGrade where there is none."""
        try:
            mark = self._ask(ask_mark(case, answer=text, settings=self._settings), read_mark)
        except _FAILURES as error:
            raise CannotGrade(str(error)) from error
        return (mark - 1) / 4

    def rate_all(
        self, cases: Sequence[Case], texts: Mapping[str, str], *, progress: Progress = lambda _done, _of: None
    ) -> dict[str, float | None]:
        """The marks of many answers at once; those that could not be had are None. `rate` then knows them."""

        def one(case: Case) -> float | None:
            try:
                return self.rate(case, texts[case.id])
            except CannotGrade:
                return None

        return dict(zip([case.id for case in cases], self._each(one, cases, progress), strict=True))

    def compare(
        self,
        cases: Sequence[Case],
        *,
        baseline: Mapping[str, str],
        candidate: Mapping[str, str],
        progress: Progress = lambda _done, _of: None,
    ) -> list[PairVerdict]:
        """Every case that both answered, in both orders."""
        asked = [case for case in cases if case.id in baseline and case.id in candidate]
        return self._each(
            lambda case: self._compare_one(case, baseline[case.id], candidate[case.id]), asked, progress
        )

    def _compare_one(self, case: Case, before: str, after: str) -> PairVerdict:
        if before == after:
            # The same words need no judge, and no judge could tell them apart.
            return PairVerdict(case.id, "tie", "tie", "the answers are the same")
        try:
            return PairVerdict(case.id, self._choose(case, before, after), self._choose(case, after, before))
        except _FAILURES as error:
            return PairVerdict(case.id, None, None, str(error))

    def _choose(self, case: Case, first: str, second: str) -> Choice:
        return self._ask(ask_pair(case, first=first, second=second, settings=self._settings), read_pair)

    def _ask(self, chat: Chat, read: Callable[[str], Reading]) -> Reading:
        """Ask; where the reply is unclear, say so and ask once more."""
        reply = self._say(chat)
        try:
            return read(reply)
        except UnclearReply:
            return read(self._say(ask_again(chat, reply=reply)))

    def _say(self, chat: Chat) -> str:
        key = key_of(chat, settings=self._settings)
        known = self._replies.get(key)
        if known is not None:
            return known.text
        if self._unanswered >= GIVE_UP_AFTER:
            raise Unanswered(f"not asked: the judge left {GIVE_UP_AFTER} questions in a row unanswered")
        self._budget.require()
        try:
            said = self._speaker.say(chat)
        except Unanswered:
            self._unanswered += 1
            raise
        self._unanswered = 0
        self._budget.add(said)
        self._replies.put(key, said)
        return said.text

    def _each(
        self, do: Callable[[Case], Reading], cases: Sequence[Case], progress: Progress
    ) -> list[Reading]:
        """In the order of the cases. The first error that is no verdict ends it; what was said is kept."""
        with ThreadPoolExecutor(max_workers=self._settings.concurrency) as pool:
            asked = [pool.submit(do, case) for case in cases]
            try:
                for done, future in enumerate(as_completed(asked), start=1):
                    future.result()
                    progress(done, len(cases))
            except BaseException:
                # Also on Ctrl-C: those that pause between two attempts leave now, the others after theirs.
                self._stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in asked]


def open_judge(settings: JudgeSettings, *, folder: Path | None) -> Judge:
    """The judge of graft.yaml; its replies are kept in `folder`."""
    stopping = threading.Event()
    speaker = ChatClient(settings, wait=stopping.wait)
    return Judge(settings, speaker=speaker, replies=ReplyStore(folder), stopping=stopping)
