"""Repair: which rows a teacher is asked, within which budget, which answers enter, what a kill costs."""

import json
import random
import threading
from collections import Counter

import pytest
from data_rows import chat, write_log
from stand_in_teacher import StandInTeacher, answer_to, failing

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.data.repair.run import (
    ANSWERED,
    JOURNAL_FILE,
    AcceptanceRules,
    RateLimit,
    Teacher,
    find_targets,
    plan_repair,
    run_repair,
)
from graftwork.data.settings import DataSettings, RepairSettings, TeacherSettings
from graftwork.data.split.assignment import assign_splits
from graftwork.grading.checks import GradeCheck
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.process.asking import ReplyJournal
from graftwork.records.errors import EnvironmentFailure, UserError

CUT = "This answer was going well until it suddenly stopped and then it was"
ENDPOINT = {"url": "http://teacher.test/v1", "model": "big"}
PROMPTS = 12


class Killed(BaseException):
    """The process is gone: nothing after this point runs."""


class DyingTeacher(StandInTeacher):
    """The process dies with the request number `after`, before it is sent or once it is answered."""

    def __init__(self, *, after, answers):
        super().__init__()
        self.after, self.answers = after, answers

    def ask_once(self, messages, decoding):
        if self.requests + 1 >= self.after and not self.answers:
            raise Killed
        reply = super().ask_once(messages, decoding)
        if self.requests >= self.after:
            raise Killed
        return reply


@pytest.fixture
def make(tmp_path):
    return lambda rows, **repair: Bench(tmp_path, rows, repair)


class Bench:
    """A log, and everything between it and the repaired rows."""

    def __init__(self, folder, rows, repair):
        self.folder = folder
        write_log(folder / "log.jsonl", rows)
        self.out = folder / "repaired.jsonl"
        teacher = {**ENDPOINT, **repair.pop("teacher", {})}
        self.data = DataSettings(
            logs=("log.jsonl",), repair=RepairSettings(teacher=TeacherSettings(**teacher), **repair)
        )

    def corpus(self, *logs):
        data = self.data.model_copy(update={"logs": logs or ("log.jsonl",)})
        return build_corpus(
            AuditContext(settings=data),
            folder=self.folder / "features",
            root=self.folder,
            on_progress=lambda *_: None,
        )

    def targets(self):
        corpus = self.corpus()
        return find_targets(corpus, assign_splits(corpus, settings=self.data), settings=self.data)

    def journal(self):
        return ReplyJournal(self.folder / "journal" / JOURNAL_FILE)

    def plan(self):
        return plan_repair(self.targets(), self.data.repair, self.journal())

    def run(self, client, *, rules=None, targets=None):
        stopping = threading.Event()
        teacher = Teacher(
            self.data.repair.teacher,
            client=client,
            journal=self.journal(),
            wait=stopping.wait,
            first_pause=1e-6,
        )
        return run_repair(
            targets or self.targets(),
            teacher=teacher,
            rules=rules or AcceptanceRules(self.data),
            out=self.out,
            stopping=stopping,
        )

    def written(self):
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def usable(self):
        return int(self.corpus("log.jsonl", "repaired.jsonl").column("passed").sum())


def question(number):
    return f"Please explain item number {number} of the {answer_to([], number)[:60]}"


def broken(number, **more):
    return chat(question(number), CUT, finish_reason="length", **more)


def good(number, **more):
    return chat(question(number), f"Item {number} is {answer_to([], number)}", finish_reason="stop", **more)


def broken_log(broken_rows=PROMPTS, good_rows=4):
    return [*map(broken, range(broken_rows)), *(good(100 + n) for n in range(good_rows))]


def test_a_plan_lists_every_faulty_row_with_tokens_and_cost(make):
    plan = make(
        [*broken_log(), chat(question(50), "Mock response"), chat(question(51), "x", status="failed")],
        teacher={"price_in": 1, "price_out": 2},
    ).plan()
    assert plan.faults == {"truncated": PROMPTS, "placeholder": 1, "failed_status": 1}
    assert {row.state for row in plan.rows} == {"ask"}
    assert all(row.tokens_in > 0 and row.tokens_out > 0 for row in plan.rows)
    assert plan.cost == pytest.approx((plan.tokens_in + 2 * plan.tokens_out) / 1e6)
    assert plan.cost_at_most == pytest.approx((plan.tokens_in + 2 * 1024 * plan.requests) / 1e6)
    assert plan.cost == pytest.approx(sum(row.cost for row in plan.rows))


def test_answers_that_prepare_would_drop_for_their_length_are_counted(make):
    bench = make(broken_log())
    roomy = plan_repair(bench.targets(), bench.data.repair, bench.journal(), longest=1024)
    tight = plan_repair(bench.targets(), bench.data.repair, bench.journal(), longest=8)
    assert (roomy.overlong, tight.overlong) == (0, PROMPTS)
    bench.data = bench.data.model_copy(update={"max_tokens": 8})
    outcome = bench.run(StandInTeacher())
    assert outcome.overlong == outcome.written == PROMPTS
    bench.data = bench.data.model_copy(update={"overlong": "truncate"})
    assert bench.run(StandInTeacher()).overlong == 0


def test_a_plan_asks_nothing_for_prompts_that_are_answered_or_repeated(make):
    bench = make([*broken_log(), good(0), broken(1)])
    plan = bench.plan()
    states = {row.origin.line: (row.state, row.why) for row in plan.rows}
    assert states[1] == ("skipped", ANSWERED)
    assert states[PROMPTS + 6][0] == "shared"
    assert plan.requests == PROMPTS - 1


def test_repaired_rows_replace_the_logged_ones_and_keep_their_origin(make):
    bench = make(broken_log())
    outcome = bench.run(StandInTeacher())
    assert outcome.states == {"accepted": PROMPTS}
    assert bench.usable() == PROMPTS + 4
    for row in bench.written():
        assert row["answered"]["by"] == "teacher"
        assert row["answered"]["name"] == "big"
        assert len(row["answered"]["prompt_hash"]) == 64
        assert len(row["answered"]["replaces"]) == 32
        assert row["answered"]["reason"] == "truncated"


def test_repaired_rows_are_never_held_out(make):
    bench = make(broken_log(60, 30))
    bench.run(StandInTeacher())
    corpus = bench.corpus("log.jsonl", "repaired.jsonl")
    split = assign_splits(corpus, settings=bench.data).split
    taught = corpus.column("unconfirmed") != 0
    assert taught.sum() == 60
    assert set(split[taught].tolist()) == {0}
    assert len(set(split[(~taught) & corpus.column("passed").astype(bool)].tolist())) == 3


def test_a_row_that_passes_again_is_replaced_by_its_repair(make):
    """Someone keeps cut-off rows: the repaired one still takes the place of the logged one."""
    bench = make(broken_log())
    bench.run(StandInTeacher())
    bench.data = bench.data.model_copy(update={"drop_truncated": False})
    corpus = bench.corpus("log.jsonl", "repaired.jsonl")
    assert int(corpus.column("passed").sum()) == PROMPTS + 4
    assert {reason.split(":")[0] for reason in corpus.withdrawn.values()} == {"replaced"}


def test_secrets_do_not_reach_the_teacher_even_where_redaction_is_off(make):
    secret = "ghp_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5"
    bench = make([chat(f"What opens with {secret} today?", CUT, finish_reason="length"), *broken_log(1)])
    bench.data = bench.data.model_copy(update={"redact": False})
    teacher = StandInTeacher()
    bench.run(teacher)
    assert teacher.requests == 2
    assert not any(secret in asked for asked in teacher.asked)


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        (StandInTeacher(finish_reason="length"), "cut off after"),
        (StandInTeacher(answer=lambda *_: "Mock response"), "placeholder"),
        (StandInTeacher(answer=lambda *_: ""), "empty"),
        (StandInTeacher(answer=lambda *_: "Here it is:\n```python\nprint(1)"), "truncated"),
    ],
)
def test_an_answer_with_a_fault_of_its_own_is_refused(make, teacher, why):
    outcome = make(broken_log()).run(teacher)
    assert outcome.states == {"refused": PROMPTS}
    assert all(why in row.why for row in outcome.rows)
    assert outcome.written == 0


def test_the_project_checks_decide_and_those_against_the_logged_reply_do_not(make):
    bench = make(broken_log())
    checks = [
        GradeCheck.model_validate({"name": "names_amber", "contains": "amber"}),
        GradeCheck.model_validate({"name": "same", "metric": "exact"}),
    ]
    rules = AcceptanceRules(bench.data, GradeContext(checks={check.name: check for check in checks}))
    outcome = bench.run(StandInTeacher(), rules=rules)
    expected = sum("amber" in answer_to([{"role": "user", "content": question(n)}]) for n in range(PROMPTS))
    assert outcome.states == {"accepted": expected, "refused": PROMPTS - expected}
    assert {row.why for row in outcome.rows if row.state == "refused"} == {"check names_amber failed"}


def test_samples_that_disagree_are_refused_and_the_best_of_those_that_agree_is_taken(make):
    def answer(messages, seed):
        return answer_to(messages, 9 if seed == 2 else 0)

    agreeing = make(broken_log(), samples=3, agreement=0.5)
    assert agreeing.run(StandInTeacher(answer=answer)).states == {"accepted": PROMPTS}
    reply = agreeing.written()[0]["reply"]
    assert reply == answer_to([{"role": "user", "content": question(0)}])
    agreeing.data = agreeing.data.model_copy(
        update={"repair": agreeing.data.repair.model_copy(update={"agreement": 0.95})}
    )
    outcome = agreeing.run(StandInTeacher(answer=answer))
    assert outcome.states == {"refused": PROMPTS}
    assert "samples agree by" in outcome.rows[0].why


class _Judge:
    def rate(self, case, text):
        if "amber" in text:
            raise CannotGrade("away")
        return 0.5 if "basin" in text else 1.0


def test_the_judge_has_the_last_word(make):
    bench = make(broken_log(30), judge_at_least=4)
    outcome = bench.run(StandInTeacher(), rules=AcceptanceRules(bench.data, judge=_Judge()))
    reasons = {row.why for row in outcome.rows if row.state == "refused"}
    assert reasons == {"the judge gave no score: away", "the judge gave 3, less than 4"}
    assert outcome.states["accepted"] == outcome.written > 0


def test_the_same_question_is_asked_once_over_many_runs(make):
    bench = make(broken_log())
    bench.run(StandInTeacher())
    first = bench.out.read_bytes()
    again = StandInTeacher()
    bench.run(again)
    assert again.requests == 0
    assert bench.out.read_bytes() == first
    assert bench.plan().cached == PROMPTS


@pytest.mark.parametrize(
    "budget", [{"max_total_tokens": 1800}, {"max_cost": 0.0018, "price_in": 1, "price_out": 1}]
)
def test_a_budget_is_never_exceeded_and_a_larger_one_goes_on(make, budget):
    bench = make(broken_log(), teacher={"concurrency": 8, **budget})
    outcome = bench.run(StandInTeacher())
    assert outcome.states["over_budget"] > 0
    assert outcome.spent.tokens_in + outcome.spent.tokens_out <= 1800
    asked = outcome.states["accepted"]
    # More than what the reservations of eight requests at once would leave room for.
    assert asked >= 3
    teacher = bench.data.repair.teacher.model_copy(update={"max_total_tokens": None, "max_cost": None})
    bench.data = bench.data.model_copy(
        update={"repair": bench.data.repair.model_copy(update={"teacher": teacher})}
    )
    second = StandInTeacher()
    assert bench.run(second).states == {"accepted": PROMPTS}
    assert second.requests == PROMPTS - asked


def test_a_teacher_that_fails_one_time_in_five_still_decides_every_row(make, monkeypatch):
    monkeypatch.setattr("graftwork.data.repair.run.ATTEMPTS", 8)
    bench = make(broken_log(80))
    teacher = StandInTeacher(faults=failing(0.2))
    outcome = bench.run(teacher)
    assert outcome.states == {"accepted": 80}
    assert outcome.undecided == 0
    assert teacher.requests > 80


def test_a_teacher_that_is_away_ends_early_and_the_next_run_asks_again(make):
    bench = make(broken_log(40), teacher={"concurrency": 1})
    away = StandInTeacher(faults=failing(1.0))
    outcome = bench.run(away)
    assert outcome.states == {"unanswered": 40}
    assert away.requests == 25
    assert outcome.undecided == 40
    assert outcome.spent.tokens_out == 0
    assert bench.run(StandInTeacher()).states == {"accepted": 40}


def test_an_error_that_no_retry_fixes_is_raised_and_keeps_the_answers(make):
    def refuse(number):
        if number == 6:
            raise EnvironmentFailure("the teacher refuses us")

    bench = make(broken_log(), teacher={"concurrency": 1})
    with pytest.raises(EnvironmentFailure):
        bench.run(StandInTeacher(faults=refuse))
    rest = StandInTeacher()
    assert bench.run(rest).states == {"accepted": PROMPTS}
    assert rest.requests == PROMPTS - 5


def test_fifty_kills_lose_no_row_and_answer_none_twice(make):
    bench = make(broken_log(60), teacher={"concurrency": 3})
    targets = bench.targets()
    chance = random.Random(7)
    journal = bench.folder / "journal" / JOURNAL_FILE
    kills = 0
    while kills < 50:
        teacher = DyingTeacher(after=chance.randint(1, 6), answers=chance.random() < 0.5)
        try:
            bench.run(teacher, targets=targets)
        except Killed:
            pass
        else:
            bench.folder.joinpath("journal").rename(bench.folder / f"journal-{kills}")
            bench.out.unlink()
        kills += 1
        if chance.random() < 0.3 and journal.exists():
            # The machine went down while a line was being written.
            with journal.open("ab") as handle:
                handle.write(b'{"event": "answered", "key": "half a li')
    outcome = bench.run(StandInTeacher(), targets=targets)
    hashes = Counter(row["answered"]["prompt_hash"] for row in bench.written())
    assert len(hashes) == 60
    assert set(hashes.values()) == {1}
    assert outcome.states == {"accepted": 60}
    assert Counter(line["key"] for line in _answered(journal)).most_common(1)[0][1] == 1


def _answered(journal):
    lines = []
    for line in journal.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if line["event"] == "answered"]


def test_requests_lost_by_a_kill_count_against_the_budget(make):
    def die(number):
        if number == 3:
            raise Killed

    bench = make(broken_log(), teacher={"concurrency": 1, "max_tokens": 500})
    with pytest.raises(Killed):
        bench.run(StandInTeacher(faults=die))
    spent = bench.plan().spent
    assert spent.requests == 2
    assert spent.lost == 1
    assert spent.tokens_out >= 500


def test_a_small_role_gets_rows_from_prompts_of_others_up_to_the_share(make):
    rows = [good(n, role="coder") for n in range(40)] + [good(100, role="reviewer")]
    bench = make(rows, augment=("reviewer",), augment_to=20)
    plan = bench.plan()
    assert plan.small_groups == {"reviewer": 1}
    assert plan.faults == {"augment": 10}
    outcome = bench.run(StandInTeacher())
    assert outcome.states == {"accepted": 10}
    assert {row["group"] for row in bench.written()} == {"reviewer"}
    assert all(row["answered"]["reason"] == "augment: role reviewer" for row in bench.written())
    corpus = bench.corpus("log.jsonl", "repaired.jsonl")
    split = assign_splits(corpus, settings=bench.data).split
    assert set(split[corpus.column("unconfirmed") != 0].tolist()) == {0}


def test_a_role_that_no_row_has_cannot_be_augmented(make):
    with pytest.raises(UserError, match="nobody"):
        make(broken_log(), augment=("nobody",)).plan()


def test_requests_are_spaced_by_the_rate_limit():
    now, waits = [100.0], []

    def wait(seconds):
        waits.append(seconds)
        return False

    limit = RateLimit(30, wait=wait, clock=lambda: now[0])
    assert all(limit.take() for _ in range(4))
    assert waits == [2.0, 4.0, 6.0]
    now[0] = 200.0
    assert limit.take()
    assert len(waits) == 3


def test_a_rate_limit_that_is_being_stopped_lets_nothing_through():
    limit = RateLimit(1, wait=lambda _seconds: True, clock=lambda: 0.0)
    assert [limit.take(), limit.take()] == [True, False]
