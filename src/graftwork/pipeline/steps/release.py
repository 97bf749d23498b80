"""Steps after the gate: publish what passed and point the alias at it, serve and ask it, write the report."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.escalation import read_forecast
from graftwork.evaluate.gate.project import find_judged_report
from graftwork.evaluate.live.drift import measure_drift
from graftwork.evaluate.project import Evaluated, put_page, savings_of
from graftwork.evaluate.project_subjects import find_without_repaired
from graftwork.evaluate.settings import CostSettings
from graftwork.files.disk import file_digest, write_atomic
from graftwork.model.base import note_on_weights
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps.evaluate import load_cases
from graftwork.project.open_project import OpenProject, current_user, load_template, name_entry, timestamp
from graftwork.records.base import Record, fingerprint
from graftwork.records.dataset import Audit
from graftwork.records.errors import WorkerFailed, needs_extra
from graftwork.records.interaction import TRY_OUT_SESSION, find_question
from graftwork.records.live import EscalationForecast
from graftwork.records.plan import Plan
from graftwork.records.release import Release, Tried
from graftwork.records.report import Case, Metric, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.folder import MINISIGN
from graftwork.registry.index import Change, promote
from graftwork.registry.manifest import Lineage, ReleaseContext
from graftwork.registry.project import full_alias, open_store, sign_release
from graftwork.registry.publish import find_licence, publish
from graftwork.registry.signatures import load_secret_key
from graftwork.registry.store import ReleaseStore
from graftwork.serve.settings import FailoverSettings
from graftwork.text.redact import publishable
from graftwork.train.run_folder import read_journal
from graftwork.train.runs import read_vitals


def _release(work: OpenProject, outputs: StepOutputs) -> Release:
    outcome, dataset = outputs.get("train", TrainOutcome), outputs.get("prepare", PreparedData).dataset
    evaluated, verdict = outputs.get("evaluate", Evaluated), outputs.get("gate", Verdict)
    alias, store = full_alias(work, work.publish_to), open_store(work)
    lineage = Lineage(
        dataset=dataset,
        plan=outputs.get("plan", Plan),
        outcome=outcome,
        report=find_judged_report(work, outcome.adapter_hash, verdict=verdict, evaluated=evaluated.report),
        verdict=verdict,
        measured_adapter=evaluated.adapter_hash,
    )
    settings = publishable(work.settings)
    if note := note_on_weights(work.base.name):
        settings = {**settings, "base_weights": note}
    # Locked until the alias points at the release: until then garbage collection could remove it.
    with store.shared_lock():
        release = publish(
            store,
            work.releases,
            lineage=lineage,
            context=ReleaseContext(
                project=work.settings.project,
                base=work.base.name,
                base_fingerprint=work.base.revision,
                template_fingerprint=dataset.template_fingerprint,
                parent=find_parent(work, lineage, settings),
                created_at=timestamp(),
                settings=settings,
                versions=outcome.versions,
                licence=find_licence(Path(work.base.folder)),
                tool_template=load_template(work).tool_template,
            ),
            adapter_folder=Path(outcome.adapter_folder),
        )
        key_file = work.settings.release.signing_key
        if key_file and not (store.folder(release.id) / MINISIGN).exists():
            sign_release(work, release, key=load_secret_key((work.project.root / key_file).expanduser()))
        store.verify(release.id)
        promote(
            work.releases,
            release,
            alias=alias,
            change=Change(current_user(), timestamp(), "the gate said deploy"),
        )
    return release


def find_parent(work: OpenProject, lineage: Lineage, settings: Mapping[str, Any]) -> str | None:
    """The release that is live; the one before it if the live one was made from exactly this. That is so if
    the step is repeated after it was killed: it must produce the same release. The same adapter with another
    verdict or other settings is a separate release.
    """
    live = work.releases.aliases().get(full_alias(work))
    if live is None:
        return None
    release = work.releases.get(live)
    outcome, verdict = lineage.outcome, lineage.verdict
    made_of = (outcome.run_id, outcome.adapter_hash, verdict.fingerprint(), fingerprint(settings))
    live_of = (release.run_id, release.adapter_hash, release.verdict_hash, fingerprint(release.settings))
    return release.parent if made_of == live_of else live


def _depends_on(work: OpenProject, _outputs: StepOutputs) -> dict[str, Any]:
    """Retention settings do not change the release; the alias that it gets first is a separate step."""
    settings = work.settings.release.model_dump(mode="json", exclude={"keep_last", "keep_days", "store"})
    return settings if work.publish_to is None else {**settings, "publish_to": work.publish_to}


RELEASE = PipelineStep(
    name="release",
    title="release it",
    needs=("prepare", "plan", "train", "evaluate", "gate"),
    makes=Release,
    depends_on=_depends_on,
    do=_release,
    identity=lambda release: str(release.id),
    still_there=lambda work, release: ReleaseStore.open(work.project.releases).has(release.id),
)


QUESTIONS = 3


class TryOut(Record):
    tried: tuple[Tried, ...]
    seconds: dict[str, float] = {}
    """Until the endpoint answered, for all answers, and until it had stopped."""


def _try_out(work: OpenProject, outputs: StepOutputs) -> TryOut:
    release = outputs.get("release", Release)
    cases = _choose_cases(outputs.get("evaluate", Evaluated))
    local = {"port": 0, "host": "127.0.0.1", "api_key_env": None}
    # As it was evaluated: the gate has not judged it on another engine yet, and no other model may answer.
    overrides = {"engine": EngineSettings(), "failover": FailoverSettings(), "models": {}}
    settings = work.settings.serve.model_copy(update={**local, **overrides})
    from graftwork.serve.project import serve_in_background

    limit, alias = work.settings.evaluate.max_new_tokens, full_alias(work, work.publish_to)

    def import_client() -> Any:
        with needs_extra("serve", why="the release is tried out through the client that its users will use"):
            from openai import OpenAI
        return OpenAI

    def ask(client: Any, case: Case, model: str) -> tuple[str, Mapping[str, str], float]:
        asked_at = time.perf_counter()
        raw = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": m.role, "content": m.content} for m in case.messages],
            max_tokens=limit,
            temperature=0,
            # Held-out questions: what is captured of this session never becomes data.
            extra_headers={"x-session-id": TRY_OUT_SESSION},
        )
        seconds = time.perf_counter() - asked_at
        return raw.parse().choices[0].message.content or "", raw.headers, seconds

    moments = [time.perf_counter()]
    with ThreadPoolExecutor(2 * QUESTIONS) as threads:
        # Imported while the engine starts.
        client_class = threads.submit(import_client)
        with serve_in_background(work, settings) as url:
            client = client_class.result()(base_url=f"{url}/v1", api_key="none", max_retries=0)
            work.reporter.progress("asking", 0, len(cases), seconds_left=None, detail={})
            moments.append(time.perf_counter())
            # Every question to the base and to the release, all at once: they share the engine's batches.
            asking = [
                [threads.submit(ask, client, case, model) for model in ("base", alias)] for case in cases
            ]
            answers = [(base.result(), released.result()) for base, released in asking]
            moments.append(time.perf_counter())
    moments.append(time.perf_counter())
    # The endpoint is down: all captures are in the store now.
    tried = []
    for case, (base, released) in zip(cases, answers, strict=True):
        text, headers, seconds = released
        capture = work.captures.get(headers["x-graft-capture"])
        if capture is None:
            raise WorkerFailed(
                f"the exchange {headers['x-graft-capture']} is not among the captures",
                why="what is served must be captured, because it becomes training data",
                fix="check .graft/serving/engine.log",
            )
        tried.append(
            Tried(
                case_id=case.id,
                question=find_question(case.messages),
                reference=case.reference,
                base_answer=base[0],
                release_answer=text,
                answered_by=headers["x-graft-release"],
                capture_id=capture.id,
                captured_reply=capture.reply,
                seconds=seconds,
            )
        )
    if any(attempt.answered_by != release.id for attempt in tried):
        raise WorkerFailed(
            "the answer came from a different release than the one that was just made",
            why=f"expected {release.id[:12]}",
            fix="check `graft release list`: another process may have moved the alias",
        )
    spent = [later - earlier for earlier, later in pairwise(moments)]
    return TryOut(tried=tuple(tried), seconds=dict(zip(("start", "answers", "stop"), spent, strict=True)))


def _choose_cases(evaluated: Evaluated) -> tuple[Case, ...]:
    """Choose cases worth looking at: those with the largest gain, of every kind of case. Cases are of one
    kind if the same metrics apply to them: answers are one, refusals another.
    """
    before, after = evaluated.report.baseline.metrics, evaluated.report.candidate.metrics
    graded = [name for name in after if name in before and after[name].kind == "rate"]

    def scores(case: Case, metrics: dict[str, Metric]) -> list[float | None]:
        return [metrics[name].scores.get(case.id) for name in graded]

    def gain(case: Case) -> float:
        return sum(score or 0 for score in scores(case, after)) - sum(
            score or 0 for score in scores(case, before)
        )

    kinds: dict[tuple[bool, ...], list[Case]] = {}
    for case in sorted(load_cases(evaluated), key=lambda case: (-gain(case), case.id)):
        kinds.setdefault(tuple(score is None for score in scores(case, after)), []).append(case)
    cases_chosen: list[Case] = []
    beginnings: set[str] = set()
    while len(cases_chosen) < QUESTIONS and any(kinds.values()):
        for cases in kinds.values():
            if cases and len(cases_chosen) < QUESTIONS:
                case = cases.pop(0)
                # The same sources asked about twice show nothing new.
                beginning = case.messages[-1].content[:60]
                if beginning not in beginnings:
                    beginnings.add(beginning)
                    cases_chosen.append(case)
    return tuple(cases_chosen)


TRY_OUT = PipelineStep(
    name="try",
    title="serve it and ask it",
    needs=("evaluate", "release"),
    makes=TryOut,
    depends_on=lambda _work, _outputs: None,
    do=_try_out,
)


class WrittenReport(Record):
    path: str
    sha256: str


def _report(work: OpenProject, outputs: StepOutputs) -> WrittenReport:
    from graftwork.views.page import ReportPage, render_report

    outcome = outputs.get("train", TrainOutcome)
    released = "release" in outputs.outputs
    entries = {name: work.ledger.get(name_entry(work, name)) for name in outputs.outputs}
    page = ReportPage(
        project=work.settings.project,
        audit=outputs.get("audit", Audit),
        dataset=outputs.get("prepare", PreparedData).dataset,
        plan=outputs.get("plan", Plan),
        steps=tuple(read_journal(work.project.runs / outcome.run_id)),
        outcome=outcome,
        vitals=read_vitals(work.project.runs / outcome.run_id),
        report=outputs.get("evaluate", Evaluated).report,
        verdict=outputs.get("gate", Verdict),
        release=outputs.get("release", Release) if released else None,
        side_by_side=outputs.get("try", TryOut).tried if released else (),
        seconds={name: entry.seconds if entry else None for name, entry in entries.items()},
        savings=savings_of(work, outputs.get("audit", Audit), outputs.get("prepare", PreparedData).dataset),
        evaluation_page=Path(put_page(work, outputs.get("evaluate", Evaluated)).page).name,
        without_repaired=f"model:{without}" if (without := find_without_repaired(work)) else "",
        drift=measure_drift(work),
        escalation=_find_forecast(work),
    )
    path = work.project.report_of(work.model)
    write_atomic(path, render_report(page))
    return WrittenReport(path=str(path), sha256=file_digest(path))


def _find_forecast(work: OpenProject) -> EscalationForecast | None:
    """The last forecast of escalation, if it is about this model."""
    forecast = read_forecast(work.project.state)
    return forecast if forecast is not None and forecast.model in ("", full_alias(work)) else None


def _report_depends_on(work: OpenProject, outputs: StepOutputs) -> list[Any]:
    inputs: list[Any] = [name for name in outputs.outputs if name in ("release", "try")]
    if (forecast := _find_forecast(work)) is not None:
        inputs.append({"escalation": fingerprint(forecast.model_dump(mode="json"))})
    costs = work.settings.evaluate.costs
    return inputs if costs == CostSettings() else [*inputs, costs.model_dump(mode="json")]


REPORT = PipelineStep(
    name="report",
    title="write the report",
    needs=("audit", "prepare", "plan", "train", "evaluate", "gate"),
    makes=WrittenReport,
    depends_on=_report_depends_on,
    do=_report,
    still_there=lambda _work, written: (
        Path(written.path).exists() and file_digest(Path(written.path)) == written.sha256
    ),
)
