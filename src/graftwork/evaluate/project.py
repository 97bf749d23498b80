"""An evaluation wired to project and store: subjects asked, answers graded and priced, a report and its page.

Input: an open project, cases, a lineup. Output: an Evaluated. Each model is asked in a child process that may
die and be started again. The sandbox and the judge are opened only where the settings ask for them. Prices
come from the catalog; whether the judge counts, from the calibration that `graft eval calibrate` left.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from pydantic import ValidationError

from graftwork.data.project import PreparedData
from graftwork.engines.local import PRECISIONS
from graftwork.evaluate.ask.answers import ANSWERS_FILE, forget_answers, read_answers
from graftwork.evaluate.ask.timing import group_of, is_timed
from graftwork.evaluate.ask.worker import GENERATION_FILE
from graftwork.evaluate.cases import hash_cases, question_key, read_cases
from graftwork.evaluate.comparison import compare, wear_of
from graftwork.evaluate.costs import DAYS_PER_MONTH, AnswerPrice, Volume, find_savings
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.judge import Judge, first_answers, judge_subjects, open_judge
from graftwork.evaluate.judge_statistics import JudgeCalibration, Mode, add_judgment
from graftwork.evaluate.report import confuse, make_report, score, sessions_of, slice_report
from graftwork.evaluate.settings import JudgeSettings
from graftwork.evaluate.subjects import (
    LOG,
    Lineup,
    Subject,
    answers_of_log,
    generation_of_log,
    share_engine,
    timed_together,
    with_one_engine,
)
from graftwork.files.dataset import iterate_drops
from graftwork.files.disk import make_folder, write_atomic
from graftwork.fleet.project import shard_environment
from graftwork.grading.code import CODE_COMPILES, CODE_PASSES, PYTHON_CALLS, PYTHON_TESTS, RememberingRunner
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import JUDGE_PREFERENCE, JUDGE_SCORE, name_of
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.catalog.prices import (
    find_token_price,
    index_prices,
    is_stale,
    list_offers,
    list_token_prices,
)
from graftwork.plan.serving import make_question, serve
from graftwork.plan.serving_question import ServeAnswer, ServeLoad, say_seconds
from graftwork.process.sandbox import open_sandbox
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.project.supervise import WorkerTask, run_job
from graftwork.records.base import Figure, Record, fingerprint
from graftwork.records.dataset import Audit, Dataset
from graftwork.records.errors import GraftError
from graftwork.records.hardware import Machine
from graftwork.records.interaction import Hosting, Savings, TokenPrice
from graftwork.records.report import Answer, Case, Generation, Report, SubjectReport, TimingJob

HOURS_PER_MONTH = 730.5
SECONDS_PER_MONTH = 3600 * HOURS_PER_MONTH
PEAK = 10.0
"""Peak load relative to the mean load, an assumption."""
MOST_USERS = 256
RAM_GIB = 64.0
USUAL_CONTEXT = 0.95
"""Share of rows that fit the context."""


def find_hosting(
    work: OpenProject, dataset: Dataset, *, calls_per_month: float, today: date
) -> Hosting | None:
    """Return the cheapest offer that fits the model and handles the load."""
    try:
        model = find_model(Path(work.base.folder))
    except GraftError:
        return None
    prompt, answer = _lengths(dataset, work.settings.evaluate.max_new_tokens)
    configured = work.settings.evaluate.costs.gpu
    gpu_name = find_gpu(configured).name if configured is not None else None
    # Machines with one GPU, the cheapest first. Free sessions are not hosting: they end by themselves.
    priced = ((offer.usd_per_hour or 0.0, offer.place, offer) for offer in list_offers() if offer.gpus == 1)
    for usd_per_hour, _, offer in sorted(priced, key=lambda entry: entry[:2]):
        if not usd_per_hour:
            continue
        try:
            gpu = find_gpu(offer.gpu)
        except GraftError:
            continue
        if gpu_name is not None and gpu.name != gpu_name:
            continue
        machine = Machine(gpu=gpu, gpus=1, ram_gib=offer.memory_gib or RAM_GIB)

        def ask(users: int, machine: Machine = machine) -> ServeAnswer:
            context = prompt + answer
            load = ServeLoad(adapters=1, users=users, context=context, answer=answer)
            return serve(make_question(model, load, machine=machine))

        try:
            # Requests at the same time at the busiest time, by Little's law.
            arriving = PEAK * calls_per_month / SECONDS_PER_MONTH
            users = max(1, math.ceil(arriving * ask(1).answer_seconds.value))
            answered = ask(users)
        except GraftError:
            continue
        if users > MOST_USERS or not answered.fits:
            continue
        stale, answer_seconds = is_stale(offer.dated, today=today), answered.answer_seconds
        old = "; the price is old, look it up" if stale else ""
        name = answered.question.machine.name
        return Hosting(
            machine=name,
            place=offer.place,
            usd_per_month=Figure.exact(usd_per_hour * HOURS_PER_MONTH, "USD"),
            users=users,
            answer_seconds=answer_seconds,
            weights=answered.weights,
            source=offer.source,
            dated=offer.dated,
            stale=stale,
            sentence=(
                f"Hosting by `graft plan serve`: {name} at {offer.place} for ${usd_per_hour:g} an "
                f"hour all month; {calls_per_month:,.0f} calls per month with peaks of {PEAK:g} "
                f"times the mean are {users} at a time, an answer takes "
                f"{say_seconds(answer_seconds.value)} ({offer.source}, {offer.dated}{old})."
            ),
        )
    return None


def _lengths(dataset: Dataset, max_new_tokens: int) -> tuple[int, int]:
    """Tokens that are read and written for a long row of the dataset."""
    summaries = list(dataset.splits.values())
    lengths = sorted(length for summary in summaries for length in summary.spread_lengths())
    rows = max(sum(summary.rows for summary in summaries), 1)
    trained = sum(summary.trained_tokens for summary in summaries) / rows
    longest = lengths[math.ceil(USUAL_CONTEXT * len(lengths)) - 1] if lengths else 2048
    answer = max(1, min(round(trained), max_new_tokens))
    return max(longest - answer, 1), answer


def price_cases(work: OpenProject, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases with the cost of their logged reply, where its tokens and a price are known."""
    if not any(case.usage is not None for case in cases):
        return cases
    prices = index_prices(list_token_prices())
    logged_model = work.settings.evaluate.costs.logged_model
    priced = []
    for case in cases:
        usage, price = case.usage, None
        if usage is not None and usage.cost is None:
            token_prices = (find_token_price(name, prices) for name in (usage.model, logged_model) if name)
            price = next((price for price in token_prices if price is not None), None)
        if usage is None or price is None or usage.prompt_tokens is None or usage.reply_tokens is None:
            priced.append(case)
            continue
        cost = price.cost_of(usage.prompt_tokens, usage.reply_tokens, usage.cached_tokens or 0)
        priced.append(case.model_copy(update={"usage": usage.model_copy(update={"cost": cost})}))
    return tuple(priced)


def price_models(models: Mapping[str, str]) -> dict[str, TokenPrice]:
    """What tokens of these models cost, by the same keys; those whose price is not known are left out."""
    prices = index_prices(list_token_prices())
    return {key: price for key, model in models.items() if (price := find_token_price(model, prices))}


def price_of_subject(work: OpenProject, subject: Subject) -> AnswerPrice | None:
    """Tokens at an endpoint with a known price; seconds of this machine for models of our own."""
    if subject.job is None:
        return None
    if subject.job.endpoint is not None:
        prices = index_prices(list_token_prices())
        return AnswerPrice(tokens=find_token_price(subject.job.endpoint.model, prices))
    return AnswerPrice(usd_per_hour=work.settings.evaluate.costs.usd_per_hour)


def savings_of(work: OpenProject, audit: Audit, dataset: Dataset) -> Savings | None:
    """What the model of this project would save on the calls that it is trained to take over."""
    roles = work.settings.all_models[work.model].keep.role
    usage = tuple(day for day in audit.usage if not roles or day.group in roles)
    if not usage:
        return None
    settings = work.settings.evaluate.costs
    prices = index_prices(list_token_prices())
    volume = Volume(settings.requests_per_month, settings.logged_model, work.settings.evaluate.confidence)
    dated = [day.day for day in usage if day.day is not None]
    calls = settings.requests_per_month
    if calls is None and dated:
        days = (max(dated) - min(dated)).days + 1
        calls = sum(day.calls for day in usage if day.day is not None) / days * DAYS_PER_MONTH
    hosting = None
    if calls is not None:
        hosting = find_hosting(work, dataset, calls_per_month=calls, today=date.today())
    return find_savings(
        usage, find_price=lambda name: find_token_price(name, prices), hosting=hosting, volume=volume
    )


MODE_OF: dict[str, Mode] = {JUDGE_SCORE: "pointwise", JUDGE_PREFERENCE: "pairwise"}
"""The mode of the judge that a metric rests on."""


def judge_identity(settings: JudgeSettings, mode: Mode) -> str:
    """A hash of all that decides what the judge says in this mode."""
    decided = settings.model_dump(
        mode="json",
        include={"url", "model", "rubric", "show_reference", "max_tokens"},
    )
    return fingerprint({**decided, "mode": mode})


def find_calibration(work: OpenProject, mode: Mode) -> JudgeCalibration | None:
    """The last calibration of exactly this judge; None if there is none."""
    settings = work.settings.evaluate.judge
    path = calibration_file(work, settings, mode) if settings is not None else None
    if settings is None or path is None or not path.is_file():
        return None
    try:
        calibration = JudgeCalibration.from_json(path.read_bytes())
    except ValidationError:
        return None
    # What it takes is as graft.yaml has it now.
    return calibration.model_copy(update={"min_kappa": settings.min_kappa, "min_labels": settings.min_labels})


def doubts_about_judge(work: OpenProject) -> dict[str, str]:
    """For each metric that rests on the judge and that the gate names: why it may not decide."""
    doubts = {}
    for metric in judged_metrics(work.settings.gate):
        calibration = find_calibration(work, MODE_OF[metric])
        if calibration is None:
            doubts[metric] = "it was not compared with people's labels yet; `graft eval calibrate` does that"
        elif calibration.why_not:
            doubts[metric] = calibration.why_not
    return doubts


def judged_metrics(gate: GateSettings) -> tuple[str, ...]:
    """The metrics of the gate's rules that rest on the judge."""
    metrics = [rule.metric for rule in gate.rules]
    metrics += [rule.metric for rule in (gate.primary_rule, gate.win_rule) if rule is not None]
    metrics += gate.abort_when.worse_on if gate.abort_when is not None else ()
    return tuple(dict.fromkeys(name for name in metrics if name in MODE_OF))


def calibration_file(work: OpenProject, settings: JudgeSettings, mode: Mode) -> Path:
    return work.project.state / JUDGED_FOLDER / f"calibration-{judge_identity(settings, mode)[:16]}.json"


JUDGED_FOLDER = "judged"
CODE = frozenset({CODE_COMPILES, CODE_PASSES, PYTHON_TESTS, PYTHON_CALLS})


class Grading:
    """Used for a whole evaluation: results of one subject are reused for the next."""

    def __init__(self, work: OpenProject, cases: Sequence[Case]) -> None:
        settings = work.settings.evaluate
        self.work = work
        self.judge: Judge | None = None
        self.sandbox: RememberingRunner | None = None
        if settings.judge is not None:
            self.judge = open_judge(settings.judge, folder=work.project.state / JUDGED_FOLDER)
        metrics = {*settings.metrics, *(check.metric for check in settings.checks)}
        # A check is written in full or in brief: {metric: python_tests, tests: …} or {python_tests: …}.
        metrics |= {
            name for case in cases for check in case.checks for name in (str(check.get("metric")), *check)
        }
        # Only where code or calls are run: a machine without a sandbox can still grade everything else.
        if metrics & CODE or any(check.files for check in settings.checks):
            self.sandbox = RememberingRunner(open_sandbox(settings.sandbox))

    def context(self) -> GradeContext:
        """A fresh context for each subject: it collects the grades that could not be computed."""
        settings = self.work.settings.evaluate
        return GradeContext(
            fields=settings.fields,
            checks={check.name: check for check in settings.checks},
            folder=self.work.project.root,
            sandbox=self.sandbox,
            judge=self.judge,
        )

    def prepare(self, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
        """Judge all answers of a subject in parallel, so that grading finds them judged."""
        settings = self.work.settings.evaluate.judge
        if self.judge is not None and settings is not None and "pointwise" in settings.modes:
            self.judge.rate_all(cases, first_answers(answers), progress=self._tell)

    def add_preference(
        self, report: Report, cases: Sequence[Case], answers: Mapping[str, Sequence[Answer]]
    ) -> Report:
        """Ask the judge which of the two answers it prefers, in both orders."""
        settings = self.work.settings.evaluate
        if self.judge is None or settings.judge is None or "pairwise" not in settings.judge.modes:
            return report
        tally = judge_subjects(
            self.judge,
            cases=cases,
            answers=answers,
            baseline=report.baseline.subject,
            candidate=report.candidate.subject,
            confidence=settings.confidence,
            progress=self._tell,
        )
        return add_judgment(report, tally)

    def _tell(self, done: int, total: int) -> None:
        self.work.reporter.progress("asking the judge", done, total, seconds_left=None, detail={})


class Evaluated(Record):
    """The report, and the folders of the answers."""

    cases_file: str
    folders: dict[str, str]
    report: Report
    champion: str | None = None
    """The release that served when this was measured, if the candidate is another one."""
    adapter_hash: str = ""
    """The adapter that was measured; empty if none of this project's was."""
    page: str = ""
    """Its page, if one was written."""


def forget_subjects(lineup: Lineup, cases: Sequence[Case]) -> None:
    """Forget all answers of these subjects to these cases: they are asked again."""
    for subject in with_one_engine(lineup).all:
        (subject.folder / GENERATION_FILE).unlink(missing_ok=True)
        if subject.job is not None:
            # On a GPU only the worker knows which one it will be.
            for precision in PRECISIONS:
                forget_answers(subject.job.model_copy(update={"precision": precision}), cases)


def ask_subject(work: OpenProject, subject: Subject, cases: Sequence[Case]) -> None:
    """Collect the subject's answers in its folder. Existing answers are not requested again."""
    if subject.job is None:
        answers = [answer.model_dump(mode="json") for answer in answers_of_log(cases)]
        lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
        write_atomic(subject.folder / ANSWERS_FILE, "".join(lines))
        generation = generation_of_log(cases, latency_cases=work.settings.evaluate.latency_cases)
        write_atomic(subject.folder / GENERATION_FILE, generation.to_json())
        return
    task = WorkerTask(
        name=f"the evaluation of {subject.name}",
        module="graftwork.evaluate.ask.worker",
        job=subject.job,
        folder=subject.folder,
        environment=shard_environment(work),
    )
    run_job(task, reporter=work.reporter, place=work.place)


def ask_everybody(work: OpenProject, lineup: Lineup, cases: Sequence[Case]) -> None:
    """Endpoints first: a wrong address or key shows at once, and not after the models have answered. Our own
    models are timed at the end, in turn, so that load on the machine affects all equally.
    """
    subjects = sorted(with_one_engine(lineup).all, key=lambda item: not item.is_endpoint)
    timed_groups = timed_together(subjects)
    shared = bool(timed_groups) and share_engine(timed_groups)
    for subject in subjects:
        if not (shared and subject in timed_groups):
            ask_subject(work, _timed_later(subject) if subject in timed_groups else subject, cases)
    if timed_groups:
        time_together(work, timed_groups, cases, answers_first=shared)


def _timed_later(subject: Subject) -> Subject:
    """Its own worker times nothing, except one request on a GPU to measure its memory."""
    assert subject.job is not None
    requests = 1 if subject.job.device.startswith("cuda") else 0
    return replace(subject, job=subject.job.model_copy(update={"latency_cases": requests}))


def time_together(
    work: OpenProject, subjects: Sequence[Subject], cases: Sequence[Case], *, answers_first: bool = False
) -> None:
    """Single requests of all subjects in turn, unless this very group was timed before."""
    jobs = tuple(subject.job for subject in subjects if subject.job is not None)
    requests = jobs[0].latency_cases
    group = group_of(jobs, cases=cases, requests=requests)
    if is_timed(jobs, group) and not answers_first:
        return
    if answers_first:
        later = (_timed_later(subject).job for subject in subjects)
        jobs = tuple(job for job in later if job is not None)
    folder = work.project.evaluations / f"timing-{group}"
    make_folder(folder)
    task = WorkerTask(
        name="the evaluation of all subjects" if answers_first else "timing the subjects in turn",
        module="graftwork.evaluate.ask.timing",
        job=TimingJob(
            folder=str(folder), jobs=jobs, requests=requests, group=group, answers_first=answers_first
        ),
        folder=folder,
    )
    run_job(task, reporter=work.reporter, place=work.place)


def measure_subjects(
    work: OpenProject, lineup: Lineup, *, cases: Sequence[Case], grading: Grading
) -> dict[str, SubjectReport]:
    """Query all subjects, then grade the answers: a judge that fails loses no answer."""
    ask_everybody(work, lineup, cases)
    scored = {}
    for subject in lineup.all:
        answers = read_answers(subject.folder)
        grading.prepare(cases, answers)
        generation = Generation.from_json((subject.folder / GENERATION_FILE).read_bytes())
        scored[subject.name] = score(
            cases,
            answers=answers,
            generation=generation,
            settings=work.settings.evaluate,
            context=grading.context(),
            price=price_of_subject(work, subject),
        )
    return scored


def log_look(work: OpenProject, cases: Sequence[Case], *, subject: str) -> int:
    """Record that a subject was measured on these cases and questions. Returns how often they were used."""
    questions = {key for case in cases if (key := question_key(case))}
    return work.looks.log(hash_cases(cases), subject=subject, when=timestamp(), questions=questions)


def report_on(
    work: OpenProject,
    lineup: Lineup,
    *,
    cases: Sequence[Case],
    scored: Mapping[str, SubjectReport],
    grading: Grading,
    subject: str,
    remarks: Sequence[str] = (),
) -> Report:
    """Compare everybody on the same cases, in pairs; `remarks` are stored and shown with it. Records that
    `subject` was measured on these cases.
    """
    settings = work.settings.evaluate
    candidate, looks = scored[lineup.candidate.name], log_look(work, cases, subject=subject)
    report = make_report(
        cases,
        baseline=scored[lineup.baseline.name],
        candidate=candidate,
        settings=settings,
        looks=looks,
        champion=scored[lineup.champion.name] if lineup.champion is not None else None,
        others=[scored[subject.name] for subject in lineup.others],
    )
    # No candidates: they do not count among those that Holm's correction is for.
    references = [scored[subject.name] for subject in lineup.references]
    against = [
        comparison
        for reference in references
        for comparison in compare(
            reference, candidate=candidate, confidence=settings.confidence, sessions=sessions_of(cases)
        )
    ]
    answers = {subject.name: read_answers(subject.folder) for subject in (lineup.baseline, lineup.candidate)}
    report = grading.add_preference(report, cases, answers)
    report = slice_report(report, cases, by=settings.slices)
    return report.model_copy(
        update={
            "others": (*report.others, *references),
            "comparisons": (*report.comparisons, *against),
            "confusions": confuse(cases, answers, checks=settings.checks, confidence=settings.confidence),
            "remarks": tuple(remarks),
            "wear": wear_of(
                report,
                candidates=work.looks.candidates(report.cases_hash),
                look=work.looks.position(report.cases_hash, subject=subject),
            ),
        }
    )


FILTER = "filter"
"""The step of the preparation that judges each row by itself."""
FAULTS = {
    "truncated": "as cut off",
    "failed_status": "as failed",
    "claims_success_but_fails": "as failed",
    "empty": "as empty or a stand-in",
    "placeholder": "as empty or a stand-in",
    "broken_call": "for tool calls that fail",
    "repeated_call": "for tool calls that fail",
    "unmatched_call": "for tool results without a call",
    "rated_bad": "as rated bad",
    "not_kept": "by data.keep",
    "negative_feedback": "for negative feedback",
    "rejected_in_review": "as rejected by a reviewer",
}


def remark_on_log(scored: Mapping[str, SubjectReport], *, prepared: PreparedData | None) -> tuple[str, ...]:
    """`prepared` is None if the cases are not of the project's own log."""
    log = scored.get(LOG)
    if log is None:
        return ()
    sentences = []
    if prepared is not None and prepared.dataset.dropped.get(FILTER):
        dataset, why = prepared.dataset, Counter[str]()
        for drop in iterate_drops(Path(prepared.folder)):
            code = drop.reason.partition(":")[0]
            if drop.step == FILTER and code in FAULTS:
                why[FAULTS[code]] += 1
        read = max(sum(source.rows for source in dataset.inputs), dataset.kept_after.get("read", 0))
        kept_rows = list(dataset.kept_after.values())[-1] if dataset.kept_after else read
        if why:
            dropped = ", ".join(f"{count:,} {reason}" for reason, count in why.most_common())
            sentences.append(
                f"The log's answers are those of the {kept_rows:,} of {read:,} rows that were kept (dropped: "
                f"{dropped}), which flatters it: see `graft data audit`."
            )
    graded = {
        name: None
        for subject in scored.values()
        for name, metric in subject.metrics.items()
        if subject is not log and metric.n and metric.kind in ("rate", "score")
    }
    names = [name_of(name) for name in graded if name not in log.metrics]
    if names:
        sentences.append(f"Not applicable to the log, whose answer is the reference: {', '.join(names)}.")
    return tuple(sentences)


PAGE = "evaluation"


def put_page(work: OpenProject, evaluated: Evaluated, *, separate: bool = False) -> Evaluated:
    """Publish the page. `separate` is an evaluation that the gate does not decide on: its page does not
    replace the other.
    """
    from graftwork.views.evaluation_page import EvaluationPage, render_evaluation

    path = work.project.page_of(PAGE, work.model)
    path = path.with_stem(f"{path.stem}-asked") if separate else path
    page = EvaluationPage(
        project=work.settings.project,
        report=evaluated.report,
        cases=read_cases(Path(evaluated.cases_file)),
        answers={name: tuple(read_answers(Path(folder))) for name, folder in evaluated.folders.items()},
    )
    write_atomic(path, render_evaluation(page))
    return evaluated.model_copy(update={"page": str(path)})
