"""Connects a project to an endpoint: aliases from the store, captures into it, and captures exported as a
log.

The model runs in a child process of the serve stage; this side stays free of torch. An export applies the
same rules as data preparation, so that training elsewhere on it is as safe.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graftwork.data.audit.row_checks import find_refusal, is_negative
from graftwork.data.settings import CaptureSettings
from graftwork.files.escalation import read_forecast
from graftwork.files.router import read_router, router_path
from graftwork.grading.metrics import TOOL_CALLS_VALID
from graftwork.pipeline.answer_checks import LiveChecks, with_call_check
from graftwork.pipeline.engine_verdicts import require_engine_gate
from graftwork.pipeline.open_project import OpenProject, load_template
from graftwork.pipeline.releases import full_alias, open_store
from graftwork.pipeline.steps.data import PreparedData
from graftwork.project.load import load_settings
from graftwork.records.errors import AnswerIsNo, UserMistake, WorkerFailed
from graftwork.records.interaction import Capture, CaptureOrigin, Feedback
from graftwork.records.release import Release
from graftwork.registry.locks import Lease
from graftwork.registry.names import split_alias
from graftwork.registry.publish import TEMPLATE_FILE
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.family import Family
from graftwork.serve.operation_settings import OperationSettings
from graftwork.serve.routing import ExperimentOff, set_up_experiment
from graftwork.serve.settings import EscalateSettings, ServeSettings, require_upstream_keys
from graftwork.store.captures import FeedbackStore
from graftwork.text.words import words

if TYPE_CHECKING:
    from graftwork.serve.run import ServedProject

READY_SECONDS = 120.0
BACKGROUND = "background"
"""The folder under `.graft/serving` of endpoints that try a release out or answer cases of a gate."""
ServedParts = Callable[[Lease, EngineJob], "ServedProject"]


class StoreSink:
    """Captures and feedback go into the project's store, which is how they become data again."""

    def __init__(self, work: OpenProject) -> None:
        self._captures = work.captures
        self._feedback = FeedbackStore(work.database, project=work.settings.project)

    def add_many(self, captures: list[Capture]) -> None:
        self._captures.add(captures)

    def add_feedback(self, feedback: Feedback) -> bool:
        return self._feedback.add(feedback)


def describe_experiment(work: OpenProject, settings: ServeSettings) -> str | None:
    """The experiment that the aliases set up now, in one line; None without a split."""
    found = set_up_experiment(settings.split, work.releases.aliases())
    if settings.split is None or found is None:
        return None
    if isinstance(found, ExperimentOff):
        return f"no experiment yet, {settings.split.alias} answers everything: {found.why}"
    kept = "" if settings.capture else "; captures are off, so nothing of it can be compared"
    return (
        f"experiment {found.experiment}: {found.share:.3g} of the sessions that ask for {found.alias} go to "
        f"{settings.split.challenger} ({found.challenger[:12]}){kept}"
    )


def engine_job(work: OpenProject, lease: Lease, settings: ServeSettings) -> EngineJob:
    """The base and every release on it that an alias points at, each verified byte by byte.

    What aliases of other models point at is left out where it needs another base or template.
    """
    aliases, own_model = work.releases.aliases(), split_alias(full_alias(work)).model
    own = {to for alias, to in aliases.items() if split_alias(alias).model == own_model}
    template = load_template(work).template_fingerprint
    live = []
    for release in (work.releases.get(release_id) for release_id in sorted(set(aliases.values()))):
        if release.id in own:
            _require_base(work, release, template)
            require_engine_gate(work, release, settings)
        if release.base_fingerprint != work.base.revision:
            work.reporter.info(f"{release.model} needs another base ({release.base}): it is not served here")
        elif release.template_fingerprint != template:
            work.reporter.info(f"{release.model} was trained with another chat template: it is not served")
        elif _may_serve(work, release, settings):
            live.append(release)
    lease.add(*(release.id for release in live))
    return EngineJob(
        folder=str(work.project.serving),
        base_folder=work.weights.folder,
        template_fingerprint=template,
        reasoning=work.settings.data.reasoning == "keep",
        adapters={release.id: str(open_store(work).get(release.id)) for release in live},
    )


def open_family(work: OpenProject, settings: ServeSettings) -> Family | None:
    """The family of the settings with its learned router; None where requests name their model."""
    if settings.family is None:
        return None
    project = work.project.settings
    aliases = {name: full_alias(work, model=name) for name in project.all_models}
    router, path = None, router_path(work.project.state)
    if settings.family.router and path.exists():
        router, card = read_router(path)
        if unknown := sorted(set(card.labels) - set(project.all_models)):
            raise UserMistake(
                f"the router chooses models that graft.yaml does not name: {', '.join(unknown)}",
                why="it was trained before they were renamed or removed",
                fix="graft train --router 0.95",
                where=str(path),
            )
    elif settings.family.router:
        work.reporter.info(
            f"no router yet: requests that no rule matches go to {project.main_model}; "
            "graft train --router 0.95"
        )
    return Family(settings.family, main=project.main_model, aliases=aliases, router=router)


def open_checks(work: OpenProject, settings: ServeSettings) -> LiveChecks | None:
    """The checks of `serve.escalate`; None where every answer is sent as it is."""
    if settings.escalate is None:
        return None
    known = {*settings.failover.endpoints, *work.releases.aliases(), "base"}
    if settings.escalate.to not in known:
        raise UserMistake(
            f"there is no {settings.escalate.to!r} to escalate to",
            why=f"known: {', '.join(sorted(known))}",
            fix="name the large model under serve.failover.endpoints, or name an alias",
            where="serve.escalate.to",
        )
    checks = LiveChecks(work, with_call_check(settings.escalate.checks))
    if settings.escalate.stream == "prefix":
        _require_prefix_checks(work, settings.escalate, checks)
    return checks


def _require_prefix_checks(work: OpenProject, settings: EscalateSettings, checks: LiveChecks) -> None:
    # Answers to requests with tools are not streamed before they are checked.
    later = ", ".join(name for name in checks.of_whole_answers if name != TOOL_CALLS_VALID)
    if not checks.of_prefixes and settings.min_logprob is None:
        raise UserMistake(
            f"no check can judge the beginning of an answer: {later or TOOL_CALLS_VALID}",
            why="`stream: prefix` sends a streamed answer when its beginning has been checked",
            fix="use json_valid, not_refused, a JSON Schema, contains, regex or format, or min_logprob; give "
            "an own function an attribute `prefix`; or set `stream: hold`",
            where="serve.escalate.stream",
        )
    if later:
        work.reporter.info(
            f"streamed answers are not held back for {later}: it needs the whole answer, and what fails it "
            'is counted as "too late"'
        )


def with_threshold(work: OpenProject, settings: ServeSettings) -> ServeSettings:
    """The settings with the threshold that `graft eval escalation --logprob` chose, where they ask for it."""
    escalate = settings.escalate
    if escalate is None or escalate.min_logprob != "auto":
        return settings
    known = read_forecast(work.project.state)
    if known is None or known.curve is None:
        raise UserMistake(
            "no threshold of log-probabilities was chosen yet",
            why="`serve.escalate.min_logprob: auto` uses the one that fits the validation cases",
            fix="graft eval escalation --logprob",
            where="serve.escalate.min_logprob",
        )
    wanted = escalate.prefix_tokens if escalate.stream == "prefix" else None
    if known.curve.prefix_tokens != wanted:
        meant = "whole answers" if wanted is None else f"the first {wanted} tokens"
        raise UserMistake(
            f"the threshold of log-probabilities was not chosen for {meant}",
            why="the mean over the first tokens is another figure than that over the whole answer",
            fix="graft eval escalation --logprob" + ("" if wanted is None else f" --prefix-tokens {wanted}"),
            where="serve.escalate.min_logprob",
        )
    chosen = escalate.model_copy(update={"min_logprob": known.curve.chosen.threshold})
    return settings.model_copy(update={"escalate": chosen})


def describe_shadow(work: OpenProject, settings: ServeSettings) -> str | None:
    """Why no request is copied as the aliases are now; None where copies can be made."""
    shadow = settings.shadow
    if shadow is None:
        return None
    names = {*work.releases.aliases(), *settings.chains, "base"}
    names |= {settings.family.name} if settings.family is not None else set()
    if shadow.to not in {*settings.failover.endpoints, *names}:
        return (
            f"shadow: there is no {shadow.to} yet: nothing is copied until an alias or endpoint is called so"
        )
    if shadow.models and not names & {*shadow.models}:
        return f"shadow: no model is called {' or '.join(shadow.models)} yet: nothing is copied"
    return None


def open_chain_checks(work: OpenProject, settings: ServeSettings) -> dict[str, LiveChecks]:
    """The checks that chains name, by name. Refuses a chain with a model that is not known."""
    project = work.project.settings
    known = {*settings.failover.endpoints, *settings.chains, *work.releases.aliases(), "base"}
    known |= {full_alias(work, model=name) for name in project.all_models}
    known |= {settings.family.name} if settings.family is not None else set()
    releases = {release.id for release in work.releases.list()}
    checks: dict[str, LiveChecks] = {}
    for name, chain in settings.chains.items():
        where = f"serve.chains.{name}"
        named = [(step.name, model) for step in chain.steps for model in (step.model, step.fallback)]
        for step, model in (*named, ("fallback", chain.fallback)):
            if model is not None and model not in known | releases:
                raise UserMistake(
                    f"there is no model {model!r} for the step {step} of the chain {name}",
                    why=f"known: {', '.join(sorted(known))}, and releases by their whole id",
                    fix="name an alias, base, an endpoint of serve.failover or another chain",
                    where=where,
                )
        for step_settings in chain.steps:
            for check in step_settings.when.fails if step_settings.when is not None else ():
                checks[check] = LiveChecks(work, [check], where=f"{where}.when.fails")
    return checks


def serve_here(
    work: OpenProject,
    settings: ServeSettings,
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
    revise: Callable[[ServeSettings], ServeSettings] | None = None,
) -> None:
    """Serve until a signal comes, or `stop` is set.

    `revise` makes the settings of a reload from those in graft.yaml; None keeps the settings.
    """
    from graftwork.pipeline.canary import find_canary
    from graftwork.pipeline.forget import prune_captures
    from graftwork.pipeline.trace_intake import read_traces
    from graftwork.serve.run import ServedProject, run, serve

    require_upstream_keys(settings)
    settings = with_threshold(work, find_certificate(settings, root=work.project.root))
    if remark := describe_shadow(work, settings):
        work.reporter.info(remark)
    with open_store(work).lease() as lease:
        job = engine_job(work, lease, settings)
        sink = StoreSink(work) if settings.capture else None
        run(
            serve(
                settings,
                engine_job=job,
                project=ServedProject(
                    resolve_aliases=work.releases.aliases,
                    find_adapter=AdapterFinder(work, lease, job.template_fingerprint, settings),
                    find_canary=lambda: find_canary(work),
                    captures=sink,
                    prune_captures=prune_captures(work, settings),
                    feedback=sink,
                    read_traces=read_traces,
                    load_keys=work.api_keys.list,
                    read_settings=None if revise is None else lambda: _read_settings(work, revise),
                    family=open_family(work, settings),
                    checks=open_checks(work, settings),
                    chain_checks=open_chain_checks(work, settings),
                ),
                on_ready=on_ready,
                stop=stop,
            )
        )


def find_certificate(settings: ServeSettings, *, root: Path) -> ServeSettings:
    """The settings with the paths of the certificate, which are relative to the project's folder."""
    named = {"tls_certificate": settings.tls_certificate, "tls_key": settings.tls_key}
    return settings.model_copy(
        update={name: str(root / path) for name, path in named.items() if path is not None}
    )


def without_operations(settings: ServeSettings) -> ServeSettings:
    """The settings of an endpoint for this process alone: no TLS, listeners, logs or spans of its own."""
    return settings.model_copy(
        update={name: field.default for name, field in OperationSettings.model_fields.items()}
    )


def _read_settings(work: OpenProject, revise: Callable[[ServeSettings], ServeSettings]) -> ServeSettings:
    return find_certificate(revise(load_settings(work.project.file).serve), root=work.project.root)


@contextmanager
def serve_in_background(
    work: OpenProject,
    settings: ServeSettings,
    *,
    project: ServedParts | None = None,
    folder: Path | None = None,
) -> Iterator[str]:
    """An endpoint in a background thread while the block runs, without an experiment. Yields its URL.

    `project` makes what it serves, by default the aliases as they are, with captures. `folder` is for its
    lock and logs, by default one of its own, so that the project's endpoint may run at the same time.
    """
    folder = folder or work.project.serving / BACKGROUND
    settings = without_operations(settings).model_copy(update={"split": None, "shadow": None})
    ready, url, failure = threading.Event(), list[str](), list[BaseException]()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def answer(address: str) -> None:
        url.append(address)
        ready.set()

    async def main() -> None:
        from graftwork.serve.run import ServedProject, serve

        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        with open_store(work).lease() as lease:
            job = engine_job(work, lease, settings).model_copy(update={"folder": str(folder)})
            served = ServedProject(resolve_aliases=work.releases.aliases, captures=StoreSink(work))
            await serve(
                settings,
                engine_job=job,
                project=served if project is None else project(lease, job),
                on_ready=answer,
                stop=stop,
            )

    def run_thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # handed to the caller's thread, which raises it
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run_thread, name="serving", daemon=True)
    thread.start()
    try:
        if not ready.wait(READY_SECONDS) or failure or not url:
            raise _not_ready(failure, folder)
        yield url[0]
    finally:
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join()


class AdapterFinder:
    """The folders of releases that aliases move to: leased first, then checked byte by byte.

    None for a release that needs another base, now and always. A release that was trained with another chat
    template is refused by name. What cannot be leased, read or verified is an error too: the store may be
    free and the release repaired later, so the caller tries again.
    """

    def __init__(
        self, work: OpenProject, lease: Lease, template: str | None, settings: ServeSettings
    ) -> None:
        self._work, self._lease, self._template, self._settings = work, lease, template, settings
        self._elsewhere: set[str] = set()

    def __call__(self, release_id: str) -> str | None:
        if release_id in self._elsewhere:
            return None
        release = self._work.releases.get(release_id)
        if release.base_fingerprint != self._work.base.revision:
            self._elsewhere.add(release_id)
            return None
        _require_template(self._work, release, self._template)
        require_engine_gate(self._work, release, self._settings)
        self._lease.add(release_id)
        return str(open_store(self._work).get(release_id))


def _may_serve(work: OpenProject, release: Release, settings: ServeSettings) -> bool:
    """Whether the engine may serve the release of another model; what it may not is reported and left out."""
    if settings.engine.kind == "endpoint":
        return False
    try:
        require_engine_gate(work, release, settings)
    except AnswerIsNo as refusal:
        work.reporter.info(f"{refusal.what}: {refusal.why}")
        return False
    return True


def _require_base(work: OpenProject, release: Release, template: str) -> None:
    """An adapter answers rightly only on the base and the template that it was trained with."""
    if release.base_fingerprint != work.base.revision:
        raise UserMistake(
            f"release {release.id[:12]} was trained on another base",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="set `base` in graft.yaml to that model, or release a new adapter",
        )
    _require_template(work, release, template)


def _require_template(work: OpenProject, release: Release, template: str | None) -> None:
    if release.template_fingerprint != template:
        raise UserMistake(
            f"release {release.id[:12]} was trained with another chat template",
            why="asked in another form than it was trained in, the model answers badly",
            fix="restore the template of the base model, or prepare and train again",
        )
    file = open_store(work).get(release.id) / TEMPLATE_FILE
    if file.is_file() and file.read_text() != load_template(work).tool_template:
        raise UserMistake(
            f"release {release.id[:12]} was trained with another form of tool calls",
            why="asked in another form than it was trained in, the model calls its tools badly",
            fix="serve it with the version of graftwork that made it, or train again",
            where=str(file),
        )


def _not_ready(failure: list[BaseException], folder: Path) -> BaseException:
    if failure:
        return failure[0]
    return WorkerFailed(
        "the endpoint did not come up in time",
        why=f"it had {READY_SECONDS:.0f} s",
        fix=f"look at {folder / 'engine.log'}",
    )


FeedbackFilter = Literal["not_negative", "positive", "negative", "all"]

HELD_OUT = "it asks a held-out question of the dataset"


class CaptureExport:
    """Iterate over it once; then `written` and `left_out` hold the counts."""

    def __init__(self, work: OpenProject, settings: CaptureSettings, *, feedback: FeedbackFilter) -> None:
        self._work = work
        self._settings = settings
        self._feedback = feedback
        self.written = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Capture]:
        held_out = _held_out_questions(self._work)
        for capture in self._work.captures.export():
            reason = self._refuse(capture)
            if reason is None and _question_of(capture.request.get("messages")) in held_out:
                reason = HELD_OUT
            if reason is None:
                self.written += 1
                yield capture
            else:
                self.left_out[reason] += 1

    def _refuse(self, capture: Capture) -> str | None:
        if capture.shadow_of is not None:
            return "no user got it: it is a shadow answer"
        origin = CaptureOrigin(
            id=capture.id,
            release=capture.release,
            at=capture.at,
            feedback=capture.feedback,
            corrected=capture.correction is not None,
        )
        judged = self._feedback in ("not_negative", "positive")
        refusal = find_refusal(origin, capture.session, self._settings, judged=judged)
        if refusal is not None:
            return refusal.reason
        if self._feedback == "negative" and not is_negative(origin, self._settings):
            return "it has no negative feedback"
        return None


def _held_out_questions(work: OpenProject) -> set[str]:
    """What the test and validation rows of the project's dataset ask; nothing where there is none."""
    entry = work.ledger.get("prepare")
    if entry is None:
        return set()
    folder = Path(PreparedData.model_validate(entry.output).folder)
    if not folder.is_dir():
        return set()
    from graftwork.files.dataset import iterate_rows

    return {
        _question_of([message.model_dump() for message in row.messages])
        for split in ("validation", "test")
        for row in iterate_rows(folder, split)
    } - {""}


def _question_of(messages: Any) -> str:
    """The text of all user messages, without case, spacing and punctuation."""
    if not isinstance(messages, list):
        return ""
    texts = [
        message["content"]
        for message in messages
        if isinstance(message, dict)
        and message.get("role") == "user"
        and isinstance(message.get("content"), str)
    ]
    return " ".join(word for text in texts for word in words(text))
