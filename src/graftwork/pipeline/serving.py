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
from typing import Any, Literal

from graftwork.data.audit.row_checks import find_refusal, is_negative
from graftwork.data.settings import CaptureSettings
from graftwork.files.router import read_router, router_path
from graftwork.pipeline.answer_checks import LiveChecks
from graftwork.pipeline.engine_verdicts import require_engine_gate
from graftwork.pipeline.open_project import OpenProject, load_template
from graftwork.pipeline.releases import full_alias, open_store
from graftwork.pipeline.steps.data import PreparedData
from graftwork.project.load import load_settings
from graftwork.records.errors import AnswerIsNo, GraftError, UserMistake, WorkerFailed
from graftwork.records.interaction import Capture, CaptureOrigin, Feedback
from graftwork.records.release import Release
from graftwork.registry.locks import Lease
from graftwork.registry.names import split_alias
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.family import Family
from graftwork.serve.routing import ExperimentOff, set_up_experiment
from graftwork.serve.settings import ServeSettings
from graftwork.store.captures import FeedbackStore
from graftwork.text.similarity import words

READY_SECONDS = 120.0


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
                fix="graft train router",
                where=str(path),
            )
    elif settings.family.router:
        work.reporter.info(
            f"no router yet: requests that no rule matches go to {project.main_model}; graft train router"
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
    return LiveChecks(work, settings.escalate.checks)


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
    from graftwork.pipeline.trace_intake import read_traces
    from graftwork.serve.run import ServedProject, run, serve

    with open_store(work).lease() as lease:
        job = engine_job(work, lease, settings)
        sink = StoreSink(work) if settings.capture else None
        run(
            serve(
                settings,
                engine_job=job,
                project=ServedProject(
                    resolve_aliases=work.releases.aliases,
                    find_adapter=_AdapterFinder(work, lease, job.template_fingerprint, settings),
                    captures=sink,
                    feedback=sink,
                    read_traces=read_traces,
                    read_settings=None if revise is None else lambda: revise(_read_settings(work)),
                    family=open_family(work, settings),
                    checks=open_checks(work, settings),
                ),
                on_ready=on_ready,
                stop=stop,
            )
        )


def _read_settings(work: OpenProject) -> ServeSettings:
    return load_settings(work.project.file).serve


@contextmanager
def serve_in_background(work: OpenProject, settings: ServeSettings) -> Iterator[str]:
    """An endpoint in a background thread while the block runs, without an experiment. Yields its URL."""
    settings = settings.model_copy(update={"split": None})
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
            await serve(
                settings,
                engine_job=engine_job(work, lease, settings),
                project=ServedProject(resolve_aliases=work.releases.aliases, captures=StoreSink(work)),
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
            raise _not_ready(failure)
        yield url[0]
    finally:
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join()


class _AdapterFinder:
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
        _require_template(release, self._template)
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
    _require_template(release, template)


def _require_template(release: Release, template: str | None) -> None:
    if release.template_fingerprint != template:
        raise UserMistake(
            f"release {release.id[:12]} was trained with another chat template",
            why="asked in another form than it was trained in, the model answers badly",
            fix="restore the template of the base model, or prepare and train again",
        )


def _not_ready(failure: list[BaseException]) -> BaseException:
    if failure and isinstance(failure[0], GraftError):
        return failure[0]
    if failure:
        return failure[0]
    return WorkerFailed(
        "the endpoint did not come up in time",
        why=f"it had {READY_SECONDS:.0f} s",
        fix="look at .graft/serving/engine.log",
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
