"""Connects a project to an endpoint: aliases and API keys from the store, captures into it; deletes captures.

The model runs in a child process of the serve stage; this side stays free of torch. Captures also come from
traces. What was captured of a session or a user can be deleted; copies in log files, datasets and releases
are found and not changed. `data/ingest/captures.py` reads captures as rows.
"""

import asyncio
import hashlib
import os
import secrets
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from graftwork.data.ingest.blocks import ReadFault
from graftwork.data.ingest.fields import BadRow
from graftwork.data.ingest.files import find_sources
from graftwork.data.ingest.trace_formats import read_otlp
from graftwork.engines.protocol import BASE, EngineJob
from graftwork.evaluate.escalation import read_forecast
from graftwork.evaluate.gate.project import require_engine_gate
from graftwork.evaluate.live.answer_checks import LiveChecks, with_call_check
from graftwork.files.dataset import iterate_rows, read_manifest
from graftwork.files.safetensors import read_router, router_path
from graftwork.grading.metrics import TOOL_CALLS_VALID
from graftwork.process.http_client import HttpClient, NoAnswer
from graftwork.project.load import load_settings
from graftwork.project.open_project import OpenProject, load_template, timestamp
from graftwork.records.base import MIB, Record
from graftwork.records.errors import EnvironmentFailure, GraftError, NegativeResult, UserError, WorkerFailed
from graftwork.records.interaction import Capture, Feedback, Interaction, Origin, TokenPrice
from graftwork.records.release import Release
from graftwork.registry.manifest import split_alias
from graftwork.registry.project import full_alias, open_store
from graftwork.registry.publish import TEMPLATE_FILE
from graftwork.registry.store import Lease
from graftwork.serve.budgets import KeyBudget
from graftwork.serve.captures import ServedExchange, redact_name
from graftwork.serve.family import Family
from graftwork.serve.keys import DEFAULT_SCOPES, ApiKey, digest_secret, make_secret
from graftwork.serve.otlp import BadTrace, TracedCalls
from graftwork.serve.routing import FindAdapter, set_up_experiment
from graftwork.serve.settings import OperationSettings, ServeSettings, require_upstream_keys
from graftwork.store.captures import FeedbackStore
from graftwork.text.redact import Redactor
from graftwork.text.wording import explain_error, parse_time

if TYPE_CHECKING:
    from graftwork.serve.run import ServedProject

READY_SECONDS = 120.0
CHECK_SECONDS = 10.0
"""How long a server may take to list its models before `graft serve` starts without having asked it."""
BACKGROUND = "background"
"""The folder under `.graft/serving` of endpoints that try a release out or answer cases of a gate."""
ServedParts = Callable[[Lease, EngineJob], "ServedProject"]
MakeEngineJob = Callable[[OpenProject, Lease, ServeSettings], EngineJob]


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
    experiment = set_up_experiment(settings.split, work.releases.aliases())
    if settings.split is None or experiment is None:
        return None
    if isinstance(experiment, str):
        return f"no experiment yet, {settings.split.alias} answers everything: {experiment}"
    remark = "" if settings.capture else "; captures are off, so it cannot be compared"
    return (
        f"experiment {experiment.experiment}: {experiment.share:.3g} of the sessions that ask for "
        f"{experiment.alias} go to {settings.split.challenger} ({experiment.challenger[:12]}){remark}"
    )


def needs_base(work: OpenProject, settings: ServeSettings) -> bool:
    """Whether an engine of our own answers: not for an endpoint, and not for endpoints before a release."""
    if settings.engine.kind == "endpoint":
        return False
    return not settings.uses_endpoints_only or bool(work.releases.aliases())


def require_known_models(work: OpenProject, settings: ServeSettings) -> None:
    """Refuse a name of `serve.models` that goes to nobody: its clients would get errors only."""
    known = {*settings.failover.endpoints, *work.releases.aliases(), "base"}
    releases = {release.id for release in work.releases.list()}
    for name, model in settings.models.items():
        if model.to not in known | releases:
            raise UserError(
                f"there is no {model.to!r} to answer for {name}",
                why=f"known: {', '.join(sorted(known))}, and releases by their full id",
                fix="use an endpoint of serve.failover.endpoints, an alias or base",
                where=f"serve.models.{name}.to",
            )


def require_accepted_keys(work: OpenProject, settings: ServeSettings) -> None:
    """Ask each server that clients' models go to for its models, with its key. Refuse a key that it refuses;
    a server that does not answer now may do so later, and a valid key may be forbidden to list models."""
    names = {model.to for model in settings.models.values()}
    servers: list[tuple[str, str | None, str | None]] = [
        (f"serve.failover.endpoints.{name}", endpoint.url, endpoint.api_key_env)
        for name, endpoint in settings.failover.endpoints.items()
        if name in names
    ]
    if settings.engine.kind == "endpoint":
        engines = [engine for engine, _ in settings.engine.split_replicas()]
        servers += [("serve.engine", engine.url, engine.api_key_env) for engine in engines]
    for where, url, variable in servers:
        if url is None:
            continue
        key = os.environ.get(variable, "").strip() if variable else ""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{url.rstrip('/')}/models", headers=headers)
        try:
            with HttpClient(proxies=False).send(request, seconds=CHECK_SECONDS) as answer:
                status = answer.status
        except (NoAnswer, ValueError) as error:
            work.reporter.info(f"{where}: {url} does not answer yet: {error}")
            continue
        if status == 403:
            work.reporter.info(
                f"{where}: {url}/models answered with status 403; requests show what is allowed"
            )
        elif status == 401:
            raise EnvironmentFailure(
                f"the server refuses the key in {variable}" if variable else "the server requires a key",
                why=f"{url}/models answered with status {status}",
                fix=f"export {variable}=… with a valid key before `graft serve`"
                if variable
                else f"specify the environment variable that contains it: {where}.api_key_env",
                where=f"{where}.api_key_env",
            )


def engine_job(work: OpenProject, lease: Lease, settings: ServeSettings) -> EngineJob:
    """The base and every release on it that an alias points at, each verified byte by byte.

    Releases of other models are left out if they need another base or template. If only endpoints
    answer, no base is needed, and none is prepared.
    """
    if not needs_base(work, settings):
        return EngineJob(folder=str(work.project.serving), base_folder="")
    aliases, (own_model, _) = work.releases.aliases(), split_alias(full_alias(work))
    own_releases = {to for alias, to in aliases.items() if split_alias(alias)[0] == own_model}
    template = load_template(work).template_fingerprint
    live = []
    for release in (work.releases.get(release_id) for release_id in sorted(set(aliases.values()))):
        same_base = release.base_fingerprint == work.base.revision
        if release.id in own_releases:
            # An adapter answers rightly only on the base and the template that it was trained with.
            if not same_base:
                raise UserError(
                    f"release {release.id[:12]} was trained on a different base",
                    why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
                    fix="set `base` in graft.yaml to that model, or release a new adapter",
                )
            _require_template(work, release, template)
            require_engine_gate(work, release, settings)
        if not same_base:
            work.reporter.info(
                f"{release.model} needs a different base ({release.base}): it is not served here"
            )
        elif release.template_fingerprint != template:
            work.reporter.info(
                f"{release.model} was trained with a different chat template: it is not served"
            )
        elif settings.engine.kind != "endpoint":
            try:
                require_engine_gate(work, release, settings)
            except NegativeResult as refusal:
                work.reporter.info(f"{refusal.what}: {refusal.why}")
            else:
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
    """The family of the settings with its learned router; None if requests name their model."""
    if settings.family is None:
        return None
    project = work.project.settings
    aliases = {name: full_alias(work, model=name) for name in project.all_models}
    router, path = None, router_path(work.project.state)
    if settings.family.router and path.exists():
        router, model_card = read_router(path)
        if unknown := sorted(set(model_card.labels) - set(project.all_models)):
            raise UserError(
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
    """The checks of `serve.escalate`; None if every answer is sent as it is."""
    if settings.escalate is None:
        return None
    models = {*settings.failover.endpoints, *work.releases.aliases(), "base"}
    if settings.escalate.to not in models:
        raise UserError(
            f"there is no {settings.escalate.to!r} to escalate to",
            why=f"known: {', '.join(sorted(models))}",
            fix="add the large model under serve.failover.endpoints, or use an alias",
            where="serve.escalate.to",
        )
    checks = LiveChecks(work, with_call_check(settings.escalate.checks))
    if settings.escalate.stream != "prefix":
        return checks
    # Answers to requests with tools are not streamed before they are checked.
    later = ", ".join(name for name in checks.of_whole_answers if name != TOOL_CALLS_VALID)
    if not checks.of_prefixes and settings.escalate.min_logprob is None:
        raise UserError(
            f"no check can judge the start of an answer: {later or TOOL_CALLS_VALID}",
            why="`stream: prefix` sends a streamed answer when its start has been checked",
            fix="use json_valid, not_refused, a JSON Schema, contains, regex or format, or min_logprob; "
            "give your own function an attribute `prefix`; or set `stream: hold`",
            where="serve.escalate.stream",
        )
    if later:
        work.reporter.info(
            f"streamed answers are not held back for {later}: it needs the whole answer, and what fails it "
            'is counted as "too late"'
        )
    return checks


def with_threshold(work: OpenProject, settings: ServeSettings) -> ServeSettings:
    """The settings with the threshold that `graft eval escalation --logprob` chose, where they ask for it."""
    escalate = settings.escalate
    if escalate is None or escalate.min_logprob != "auto":
        return settings
    forecast = read_forecast(work.project.state)
    if forecast is None or forecast.curve is None:
        raise UserError(
            "no threshold of log-probabilities was chosen yet",
            why="`serve.escalate.min_logprob: auto` uses the one that fits the validation cases",
            fix="graft eval escalation --logprob",
            where="serve.escalate.min_logprob",
        )
    prefix_tokens = escalate.prefix_tokens if escalate.stream == "prefix" else None
    if forecast.curve.prefix_tokens != prefix_tokens:
        meant = "whole answers" if prefix_tokens is None else f"the first {prefix_tokens} tokens"
        raise UserError(
            f"the threshold of log-probabilities was not chosen for {meant}",
            why="the mean over the first tokens differs from that over the whole answer",
            fix="graft eval escalation --logprob"
            + ("" if prefix_tokens is None else f" --prefix-tokens {prefix_tokens}"),
            where="serve.escalate.min_logprob",
        )
    escalate_settings = escalate.model_copy(update={"min_logprob": forecast.curve.chosen.threshold})
    return settings.model_copy(update={"escalate": escalate_settings})


def describe_shadow(work: OpenProject, settings: ServeSettings) -> str | None:
    """Why no request is copied as the aliases are now; None if copies can be made."""
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
    models = {*settings.failover.endpoints, *settings.chains, *work.releases.aliases(), "base"}
    models |= {full_alias(work, model=name) for name in project.all_models}
    models |= {settings.family.name} if settings.family is not None else set()
    releases = {release.id for release in work.releases.list()}
    checks: dict[str, LiveChecks] = {}
    for name, chain in settings.chains.items():
        where = f"serve.chains.{name}"
        step_models = [(step.name, model) for step in chain.steps for model in (step.model, step.fallback)]
        for step, model in (*step_models, ("fallback", chain.fallback)):
            if model is not None and model not in models | releases:
                raise UserError(
                    f"there is no model {model!r} for the step {step} of the chain {name}",
                    why=f"known: {', '.join(sorted(models))}, and releases by their full id",
                    fix="use an alias, base, an endpoint of serve.failover or another chain",
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
    from graftwork.evaluate.live.canary import find_canary
    from graftwork.serve.run import ServedProject, run, serve

    require_upstream_keys(settings)
    require_known_models(work, settings)
    require_accepted_keys(work, settings)
    settings = with_threshold(work, find_certificate(settings, root=work.project.root))
    if remark := describe_shadow(work, settings):
        work.reporter.info(remark)
    with open_store(work).lease() as lease:
        job = engine_job(work, lease, settings)
        sink = StoreSink(work) if settings.capture else None
        find_adapter: FindAdapter = lambda _release: ""  # noqa: E731  (the engine says why it loads none)
        if job.base_folder:
            find_adapter = AdapterFinder(work, lease, job.template_fingerprint, settings)
        run(
            serve(
                settings,
                engine_job=job,
                project=ServedProject(
                    resolve_aliases=work.releases.aliases,
                    find_adapter=find_adapter,
                    find_canary=lambda: find_canary(work),
                    captures=sink,
                    prune_captures=prune_captures(work, settings),
                    feedback=sink,
                    read_traces=read_traces,
                    load_keys=work.api_keys.list,
                    read_settings=None if revise is None else partial(read_settings, work, revise),
                    family=open_family(work, settings),
                    checks=open_checks(work, settings),
                    chain_checks=open_chain_checks(work, settings),
                    find_prices=find_prices,
                ),
                on_ready=on_ready,
                stop=stop,
            )
        )


def find_prices(settings: ServeSettings) -> dict[str, TokenPrice]:
    """What tokens of the endpoints cost, by their names; `base` too, where an endpoint answers for it."""
    from graftwork.evaluate.project import price_models

    models = {name: endpoint.model for name, endpoint in settings.failover.endpoints.items()}
    if settings.engine.kind == "endpoint":
        models[BASE] = settings.engine.model or ""
    return price_models(models)


def read_settings(work: OpenProject, revise: Callable[[ServeSettings], ServeSettings]) -> ServeSettings:
    """The settings of a reload. A name of `serve.models` that goes to nobody is refused, as at the start."""
    settings = find_certificate(revise(load_settings(work.project.file).serve), root=work.project.root)
    require_known_models(work, settings)
    return settings


def find_certificate(settings: ServeSettings, *, root: Path) -> ServeSettings:
    """The settings with the paths of the certificate, which are relative to the project's folder."""
    paths = {"tls_certificate": settings.tls_certificate, "tls_key": settings.tls_key}
    return settings.model_copy(
        update={name: str(root / path) for name, path in paths.items() if path is not None}
    )


def without_operations(settings: ServeSettings) -> ServeSettings:
    """The settings of an endpoint for this process only: no TLS, listeners, logs or spans of its own."""
    return settings.model_copy(
        update={name: field.default for name, field in OperationSettings.model_fields.items()}
    )


@contextmanager
def serve_in_background(
    work: OpenProject,
    settings: ServeSettings,
    *,
    project: ServedParts | None = None,
    make_job: MakeEngineJob | None = None,
    folder: Path | None = None,
) -> Iterator[str]:
    """An endpoint in a background thread while the block runs, without an experiment. Yields its URL.

    `project` makes what it serves, by default the aliases as they are, with captures; `make_job` what the
    engine loads, by default what aliases point at. `folder` is for its lock and logs, by default one of its
    own, so that the project's endpoint may run at the same time.
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
            job = (make_job or engine_job)(work, lease, settings).model_copy(update={"folder": str(folder)})
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
            late = WorkerFailed(
                "the endpoint did not come up in time",
                why=f"it had {READY_SECONDS:.0f} s",
                fix=f"see {folder / 'engine.log'}",
            )
            raise failure[0] if failure else late
        yield url[0]
    finally:
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join()


class AdapterFinder:
    """The folders of releases that aliases move to: leased first, then checked byte by byte.

    None for a release that needs another base, now and always. A release that was trained with a different
    chat template is refused by name. What cannot be leased, read or verified is an error too: the store may
    be free and the release repaired later, so the caller tries again.
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


def _require_template(work: OpenProject, release: Release, template: str | None) -> None:
    if release.template_fingerprint != template:
        raise UserError(
            f"release {release.id[:12]} was trained with a different chat template",
            why="a model that is prompted differently than in training answers badly",
            fix="restore the template of the base model, or prepare and train again",
        )
    file = open_store(work).get(release.id) / TEMPLATE_FILE
    if file.is_file() and file.read_text() != load_template(work).tool_template:
        raise UserError(
            f"release {release.id[:12]} was trained with a different form of tool calls",
            why="a model that is prompted differently than in training calls its tools badly",
            fix="serve it with the version of graftwork that made it, or train again",
            where=str(file),
        )


_ID_BYTES = 6


def create_key(
    work: OpenProject,
    name: str,
    *,
    scopes: Iterable[str] = DEFAULT_SCOPES,
    models: Iterable[str] = (),
    budget: KeyBudget | None = None,
    expires: str | None = None,
) -> tuple[ApiKey, str]:
    """The key and its secret, which is stored nowhere: this is the only time that it can be read.

    `expires` is a span such as 30d, or a date or time in UTC.
    """
    secret = make_secret()
    try:
        key = ApiKey.model_validate(
            {
                "id": secrets.token_hex(_ID_BYTES),
                "name": name,
                "digest": digest_secret(secret),
                "scopes": tuple(dict.fromkeys(scopes)),
                "models": tuple(dict.fromkeys(models)),
                "budget": budget or KeyBudget(),
                "created_at": timestamp(),
                "expires_at": None if expires is None else parse_expiry(expires, now=datetime.now(UTC)),
            }
        )
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_input=False)[0]
        option = str(first["loc"][0])
        raise UserError(
            f"the key's {option} is not valid",
            why=explain_error(first),
            fix="`graft serve keys create --help` lists the accepted values",
            where=option,
        ) from None
    if not work.api_keys.add(key):
        raise UserError(
            f"there is a valid key {name!r} already",
            why="logs and metrics name a key by it",
            fix=f"choose another name, or `graft serve keys revoke {name}` first",
            where=name,
        )
    return key, secret


def revoke_key(work: OpenProject, name: str) -> ApiKey:
    """Revoke the valid key with this name or id."""
    for key in work.api_keys.list():
        if name in (key.id, key.name) and key.revoked_at is None:
            revoked_at = timestamp()
            work.api_keys.revoke(key.id, at=revoked_at)
            return key.model_copy(update={"revoked_at": revoked_at})
    raise UserError(
        f"there is no valid key {name!r}",
        why="no key of the project has that name or id, or it is revoked already",
        fix="`graft serve keys list` shows all",
        where=name,
    )


def parse_expiry(text: str, *, now: datetime) -> str:
    expires_at = parse_time(text, now=now)
    if expires_at is None:
        raise UserError(
            f"{text!r} is not an expiry time",
            why="it is neither a span nor a date",
            fix="write 12h, 30d, 2026-12-31 or 2026-12-31T18:00 (UTC)",
            where="--expires",
        )
    if expires_at <= now:
        raise UserError(
            "the key would have expired already",
            why=f"{text} is in the past",
            fix="use a later time",
            where="--expires",
        )
    return expires_at.isoformat(timespec="seconds")


_ORIGIN = Origin(file="/v1/traces", line=1)
UNKNOWN_MODEL = "unknown"


def read_traces(row: dict[str, Any]) -> TracedCalls:
    try:
        results = read_otlp(row, _ORIGIN)
    except (BadRow, RecursionError) as error:
        raise BadTrace(str(error) or "the request is nested too deeply") from None
    faults = [result.message for result in results if isinstance(result, ReadFault)]
    exchanges = []
    for call in results:
        if not isinstance(call, Interaction) or not call.reply:
            continue
        request: dict[str, Any] = {"messages": [turn.model_dump() for turn in call.messages]}
        if call.max_tokens is not None:
            request["max_tokens"] = call.max_tokens
        identity = hashlib.sha256(f"{call.trace}\0{call.id}".encode(errors="replace")).hexdigest()
        stated = call.extra.get("timestamp")
        exchanges.append(
            ServedExchange(
                id=identity[:32],
                at=datetime.fromisoformat(stated).timestamp() if isinstance(stated, str) else time.time(),
                session=call.session,
                model=call.group or call.extra.get("service") or "traced",
                release=call.model or UNKNOWN_MODEL,
                request=request,
                reply=call.reply,
                finish_reason=call.finish_reason,
                prompt_tokens=call.prompt_tokens or 0,
                reply_tokens=call.reply_tokens or 0,
                first_token_ms=call.first_token_ms,
                total_ms=call.duration_ms or 0.0,
                trace=call.trace,
                cost=call.cost,
                cached_tokens=call.cached_tokens,
                size=sum(len(turn.content) for turn in call.messages) + len(call.reply),
            )
        )
    return exchanges, faults


class FileCopies(Record):
    """A log file that contains deleted captures."""

    file: str
    lines: int


class DatasetCopies(Record):
    """A dataset with rows of deleted captures, and the releases that were trained on it."""

    folder: str
    rows: int
    releases: tuple[str, ...] = ()


class Forgotten(Record):
    """`deleted` is False for a dry run: nothing was changed."""

    deleted: bool
    captures: int
    feedback: int
    """Feedback on these captures; for a user, also what they gave on others."""
    files: tuple[FileCopies, ...] = ()
    datasets: tuple[DatasetCopies, ...] = ()
    unread: tuple[str, ...] = ()
    """Log files and folders of datasets that could not be searched for copies."""


def forget_captures(
    work: OpenProject, *, session: str | None = None, user: str | None = None, dry_run: bool = True
) -> Forgotten:
    """Delete the captures of a session or a user with their feedback and reviews, or count them."""
    subject = session if session is not None else user
    assert subject is not None
    # How the store may have an id: as it is, as a pseudonym, or as a header came in.
    forms = [subject, subject.encode(errors="replace").decode("latin-1")]
    for kind in ("session", "user"):
        forms += [redact_name(form, Redactor(), kind=kind) or form for form in forms[:2]]
    names = tuple(dict.fromkeys(forms))

    def is_theirs(capture: Capture) -> bool:
        if session is not None:
            return capture.session in names
        if capture.user in names or capture.request.get("user") in names:
            return True
        # A request without a session is in the session of its user.
        return capture.user is None and capture.session in names

    ids = tuple(capture.id for capture in work.captures.holding(names) if is_theirs(capture))
    book = FeedbackStore(work.database, project=work.settings.project)
    gone, by_user = set(ids), {} if user is None else book.by(names)
    own_feedback = [position for position, entry in by_user.items() if entry.capture not in gone]
    unread: list[str] = []
    on_them = sum(len(book.of_capture(id_)) for id_ in ids)
    forgotten = Forgotten(
        deleted=not dry_run,
        captures=len(ids),
        feedback=on_them + len(own_feedback),
        files=tuple(_find_in_files(work, ids, unread)) if ids else (),
        datasets=tuple(_find_in_datasets(work, set(ids), unread)) if ids else (),
        unread=tuple(unread),  # filled by the two searches before
    )
    if not dry_run:
        work.captures.delete(ids)
        if own_feedback:
            book.delete(own_feedback)
            work.database.forget_log()
    return forgotten


def _find_in_files(work: OpenProject, ids: Iterable[str], unread: list[str]) -> Iterator[FileCopies]:
    """The log files of the project with lines that name one of the captures."""
    encoded_ids = {id_.encode() for id_ in ids}
    for pattern in work.settings.data.logs:
        try:
            names = find_sources([pattern], root=work.project.root)
        except GraftError:
            continue  # a log that is not there holds nothing
        for path in (work.project.root / name for name in names):
            try:
                with path.open("rb") as lines:
                    count = sum(any(part in encoded_ids for part in line.split(b'"')) for line in lines)
            except OSError:
                unread.append(str(path))
                continue
            if count:
                yield FileCopies(file=str(path), lines=count)


def _find_in_datasets(work: OpenProject, ids: Collection[str], unread: list[str]) -> Iterator[DatasetCopies]:
    folders = sorted(work.project.datasets.iterdir()) if work.project.datasets.is_dir() else []
    releases = work.releases.list() if folders else ()
    for folder in folders:
        try:
            rows = sum(
                row.capture is not None and row.capture.id in ids
                for split in read_manifest(folder).splits
                for row in iterate_rows(folder, split)
            )
        except (GraftError, OSError):
            unread.append(str(folder))  # damaged, half removed, or of another version
            continue
        if rows:
            trained = tuple(r.id for r in releases if r.dataset_hash == folder.name)
            yield DatasetCopies(folder=str(folder), rows=rows, releases=trained)


def prune_captures(work: OpenProject, settings: ServeSettings) -> Callable[[], object] | None:
    """What deletes captures beyond the limits of the settings; None if there are none."""
    days, mib = settings.capture_keep_days, settings.capture_keep_mib
    if days is None and mib is None:
        return None

    def prune() -> object:
        before = None
        if days is not None:
            before = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="milliseconds")
        return work.captures.prune(before=before, most_bytes=None if mib is None else int(mib * MIB))

    return prune
