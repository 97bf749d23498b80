"""Conversations with one model of a project, before the gate has decided about it or after.

In: an open project, and what to chat with: a run, a model, an adapter folder, a release, the base, or another
endpoint. Out: an endpoint for this process only, streamed answers, and feedback on them. It answers with the
engine and the prompts of an evaluation. Exchanges are captured as those of `graft serve`; held-out questions
among them never become training rows, which `data/capture_export.py` sees to.
"""

import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.data.project import find_latest_dataset
from graftwork.engines.protocol import BASE, EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.project_subjects import explain_unfinished, find_trained, find_weights, read_held_out
from graftwork.evaluate.subjects import Kind, NamedSubject, parse_subject
from graftwork.files.disk import make_folder, read_record, write_atomic
from graftwork.http.messages import ApiError
from graftwork.model.base import is_ready
from graftwork.process.http_client import HttpAnswer, NoAnswer
from graftwork.process.worker import lock_holder, start_detached
from graftwork.project.open_project import OpenProject, load_template
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError, WorkerFailed
from graftwork.records.interaction import CHAT_SESSION, Capture, Message
from graftwork.records.report import Case, Endpoint
from graftwork.registry.index import find_release
from graftwork.registry.store import Lease
from graftwork.serve.feedback import PAUSES, parse_feedback
from graftwork.serve.own_endpoint import OwnEndpoint, gateway_folder
from graftwork.serve.project import StoreSink, serve_in_background, without_operations
from graftwork.serve.settings import FailoverSettings, ServeSettings, require_upstream_keys
from graftwork.train.runs import find_run

if TYPE_CHECKING:
    from graftwork.serve.run import ServedProject
    from graftwork.store.runs import RunEntry

CHAT = "chat"
"""The folder under `.graft/serving`."""
FEEDBACK_SECONDS = 30.0
IDLE_SECONDS = 600.0
"""The background process ends when nothing was asked for so long."""
START_SECONDS = 180.0
_POLL_SECONDS = 0.1
_NAMES_FILE, _ADDRESS_FILE = "asked.json", "address.json"
_LOAD_SECONDS = 60.0
_starting = threading.Lock()
_MOST_RUNS = 1000
_NOT_ANSWERED: tuple[Kind, ...] = ("prompt", "logged_prompt", "log")


@dataclass(frozen=True)
class ChatSubject:
    """Who answers. `model` is what the engine is asked for."""

    name: str
    model: str = BASE
    folder: str | None = None
    """The adapter; None for the base and for another endpoint."""
    release: str | None = None
    endpoint: Endpoint | None = None


class ChatAnswer(Record):
    """What a model answered. Calls of tools are in the text, in the tags that models are trained on."""

    subject: str
    text: str
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    capture: str | None = None
    """The id that feedback names; None where `serve.capture` is off."""


def find_chat_subject(work: OpenProject, text: str | None) -> ChatSubject:
    """The subject that is meant; without a text the newest run of this base that has finished."""
    if text is None:
        return _newest_run(work)
    endpoints = work.settings.serve.failover.endpoints
    if (remote := endpoints.get(text)) is not None:
        endpoint = Endpoint(url=str(remote.url), model=remote.model, api_key_env=remote.api_key_env)
        return ChatSubject(text, endpoint=endpoint)
    subject = _parse(work, text)
    if subject.kind in _NOT_ANSWERED or subject.engine:
        raise UserError(
            f"{text!r} cannot answer questions of your own",
            why="it exists for the cases of an evaluation only",
            fix="use run:ID, model:NAME, release:ID, an alias, base or URL#MODEL",
            where="SUBJECT",
        )
    if subject.kind == "endpoint":
        return ChatSubject(subject.name, endpoint=subject.endpoint)
    return _find_local(work, subject)


def _find_local(work: OpenProject, subject: NamedSubject) -> ChatSubject:
    if subject.kind == "run":
        run = find_run(work, subject.which)
        run_id = run.id if run is not None else subject.which
        subject = subject._replace(name=f"run:{run_id}", which=run_id)
    if subject.kind in ("adapter", "model"):
        # Captures name the run: a model is trained again.
        outcome = find_trained(work, subject.which or work.model)
        if outcome is not None and work.runs.get(outcome.run_id) is not None:
            subject = NamedSubject(f"run:{outcome.run_id}", "run", which=outcome.run_id)
        elif subject.kind == "adapter":
            return _newest_run(work)
    weights = find_weights(work, subject, None)
    if weights is None:
        return ChatSubject(BASE)
    if weights.release is not None:
        return ChatSubject(subject.name, weights.release, str(weights.folder), release=weights.release)
    return ChatSubject(subject.name, subject.name, str(weights.folder))


def _parse(work: OpenProject, text: str) -> NamedSubject:
    """As subjects of an evaluation; the id of a run and the name of a release need nothing before it."""
    try:
        return parse_subject(text)
    except UserError as error:
        if text.startswith(("http://", "https://", "engine:")):
            raise
        not_a_subject = error
    if any(run.id.startswith(text) for run in work.runs.list(limit=_MOST_RUNS)):
        return NamedSubject(f"run:{text}", "run", which=text)
    try:
        find_release(work.releases, text)
    except UserError:
        names = ", ".join(choice.name for choice in list_chat_subjects(work) if not choice.why_not)
        raise UserError(
            f"there is no {text!r} to chat with",
            why=f"known: {names}, and endpoints as URL#MODEL",
            fix="use one of these, for example `graft chat base`",
            where="SUBJECT",
        ) from not_a_subject
    return NamedSubject(f"release:{text}", "release", which=text)


def _newest_run(work: OpenProject) -> ChatSubject:
    runs = work.runs.list(limit=_MOST_RUNS)
    revision = _revision(work) if runs else None
    done = next((run for run in runs if _why_not(run, revision) is None), None)
    if done is not None:
        if runs[0].state == "failed":
            failure = runs[0].error or {}
            work.reporter.info(
                f"run {runs[0].id} is newer and failed: {failure.get('what', 'no error is known')}"
            )
        return find_chat_subject(work, f"run:{done.id}")
    if runs and runs[0].error is not None:
        raise explain_unfinished(runs[0].id, runs[0])
    raise UserError(
        "no run of this project has finished yet",
        why="without a subject, the newest run answers",
        fix="`graft train` trains one; `graft chat base` asks the base model",
        where="SUBJECT",
    )


class ChatChoice(Record):
    """A subject that can be named, or why it cannot answer."""

    name: str
    kind: Kind
    about: str = ""
    why_not: str = ""


def list_chat_subjects(work: OpenProject, *, runs: int = 20) -> tuple[ChatChoice, ...]:
    """The newest runs, the models, the releases with their aliases, the base and the endpoints. Fetches no
    base.
    """
    choices, revision = [], _revision(work, fetch=False)
    for entry in work.runs.list(limit=runs):
        why_not = _why_not(entry, revision) or ""
        choices.append(ChatChoice(name=f"run:{entry.id}", kind="run", about=entry.state, why_not=why_not))
    for name in work.project.settings.models:
        why_not = "" if find_trained(work, name) is not None else "it is not trained"
        choices.append(ChatChoice(name=f"model:{name}", kind="model", why_not=why_not))
    aliases = work.releases.aliases()
    for release in work.releases.list():
        names = [alias for alias, release_id in aliases.items() if release_id == release.id]
        why_not = "" if release.base_fingerprint in (None, revision) else f"it needs {release.base}"
        choices.append(
            ChatChoice(
                name=f"release:{release.id[:12]}", kind="release", about=", ".join(names), why_not=why_not
            )
        )
    choices.append(ChatChoice(name=BASE, kind="base", about=work.settings.base))
    for name, remote in work.settings.serve.failover.endpoints.items():
        choices.append(ChatChoice(name=name, kind="endpoint", about=f"{remote.url}#{remote.model}"))
    return tuple(choices)


def _revision(work: OpenProject, *, fetch: bool = True) -> str | None:
    """The commit or hash of the base; None where it is not on this machine, and so fits nothing."""
    with suppress(GraftError):
        if fetch or is_ready(work.settings.base, project_folder=work.project.root):
            return work.base.revision
    return None


def _why_not(entry: "RunEntry", revision: str | None) -> str | None:
    """Why this run cannot answer on the base of this revision; None if it can."""
    if entry.outcome is None:
        failure = entry.error or {}
        return str(failure.get("what") or f"it is {entry.state}")
    if entry.plan.get("base_fingerprint") not in (None, revision):
        base = entry.plan.get("base")
        return f"it was trained on {base}" + ("" if revision else ", which is not on this machine yet")
    folder = entry.outcome.get("adapter_folder")
    return None if isinstance(folder, str) and Path(folder).is_dir() else "its adapter is gone"


def read_example(work: OpenProject, number: int) -> Case:
    """The held-out case of this number, counted from 1, as the evaluation asks it."""
    cases = read_held_out(work, find_latest_dataset(work))
    if not 1 <= number <= len(cases):
        raise UserError(
            f"there is no example {number}",
            why=f"there are {len(cases)} held-out cases",
            fix=f"choose one from 1 to {len(cases)}" if cases else "raise data.test and prepare again",
            where="--example",
        )
    return cases[number - 1]


def count_examples(work: OpenProject) -> int:
    """How many held-out cases can be asked; 0 without a dataset."""
    try:
        return len(read_held_out(work, find_latest_dataset(work)))
    except GraftError:
        return 0


class _ChatSink(StoreSink):
    """Names the subject in captures of another endpoint, which the engine knows as `base`."""

    def __init__(self, work: OpenProject, subject: ChatSubject) -> None:
        super().__init__(work)
        self._subject = subject

    def add_many(self, captures: list[Capture]) -> None:
        if self._subject.endpoint is not None:
            named = {"release": self._subject.name, "model": self._subject.name}
            captures = [capture.model_copy(update=named) for capture in captures]
        super().add_many(captures)


def chat_settings(work: OpenProject, subject: ChatSubject) -> ServeSettings:
    """The settings of `serve` for one subject: no other model may answer, and nobody else is served. Without
    TLS, as `serve_in_background` serves.
    """
    engine = EngineSettings()
    if subject.endpoint is not None:
        remote = subject.endpoint
        engine = EngineSettings(
            kind="endpoint", url=remote.url, model=remote.model, api_key_env=remote.api_key_env
        )
    overrides: dict[str, Any] = {
        "models": {},
        "family": None,
        "escalate": None,
        "chains": {},
        "failover": FailoverSettings(retries=0),
    }
    local = {"port": 0, "host": "127.0.0.1", "api_key_env": None}
    settings = work.settings.serve.model_copy(update={"engine": engine, **overrides, **local})
    return without_operations(settings)


@contextmanager
def open_chat(
    work: OpenProject, subject: ChatSubject, *, max_tokens: int | None = None, temperature: float = 0.0
) -> Iterator["Chat"]:
    """Start the engine that answers; it ends with the block."""
    settings = chat_settings(work, subject)
    require_upstream_keys(settings)
    folder = work.project.serving / CHAT / secrets.token_hex(4)

    def make_job(work: OpenProject, lease: Lease, settings: ServeSettings) -> EngineJob:
        if subject.release is not None:
            lease.add(subject.release)
        adapters = {subject.model: subject.folder} if subject.folder is not None else {}
        return _make_job(work, folder, adapters=adapters, settings=settings)

    def serve_parts(_lease: Lease, _job: EngineJob) -> "ServedProject":
        from graftwork.serve.run import ServedProject

        sink = _ChatSink(work, subject) if settings.capture else None
        return ServedProject(resolve_aliases=dict, captures=sink, feedback=sink)

    limit = max_tokens or work.settings.evaluate.max_new_tokens
    work.reporter.progress(f"loading {subject.name}", 0, 1, seconds_left=None, detail={})
    try:
        with serve_in_background(
            work, settings, project=serve_parts, make_job=make_job, folder=folder
        ) as url:
            work.reporter.progress(f"loading {subject.name}", 1, 1, seconds_left=None, detail={})
            yield Chat(
                subject=subject.name,
                model=subject.model,
                endpoint=OwnEndpoint(
                    settings.model_copy(update={"port": _port_of(url)}), root=work.project.root
                ),
                max_tokens=min(limit, settings.max_new_tokens_limit),
                temperature=temperature,
                seconds=settings.request_timeout_seconds,
                is_remote=subject.endpoint is not None,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_job(
    work: OpenProject, folder: Path, *, adapters: dict[str, str], settings: ServeSettings
) -> EngineJob:
    if settings.engine.kind == "endpoint":
        return EngineJob(folder=str(folder), base_folder="")
    return EngineJob(
        folder=str(folder),
        base_folder=work.weights.folder,
        template_fingerprint=load_template(work).template_fingerprint,
        reasoning=work.settings.data.reasoning == "keep",
        adapters=adapters,
    )


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


class ChatNames(Record):
    """What the background process is to load, as subjects were named."""

    names: tuple[str, ...] = ()


class ChatAddress(Record):
    """Where the background process listens."""

    pid: int
    port: int


def listen(work: OpenProject, *, idle_seconds: float = IDLE_SECONDS) -> None:
    """Answer as any model on this base that `ask_in_background` names, until none was asked for a while."""
    folder = _shared_folder(work)
    settings = chat_settings(work, ChatSubject(BASE))
    subjects: dict[str, ChatSubject] = {}

    def find_subjects() -> dict[str, str]:
        for name in _read_names(folder):
            with suppress(GraftError):  # it was there when it was asked for
                subjects[name] = subjects.get(name) or find_chat_subject(work, name)
        return {name: subject.model for name, subject in subjects.items() if subject.folder is not None}

    def make_job(work: OpenProject, _lease: Lease, settings: ServeSettings) -> EngineJob:
        return _make_job(work, folder, adapters={}, settings=settings)

    def serve_parts(lease: Lease, _job: EngineJob) -> "ServedProject":
        from graftwork.serve.run import ServedProject

        def find_adapter(model: str) -> str | None:
            subject = next(subject for subject in subjects.values() if subject.model == model)
            if subject.release is not None:
                lease.add(subject.release)
            return subject.folder

        return ServedProject(
            refresh_seconds=0.2,
            resolve_aliases=find_subjects,
            find_adapter=find_adapter,
            captures=StoreSink(work) if settings.capture else None,
        )

    with serve_in_background(work, settings, project=serve_parts, make_job=make_job, folder=folder) as url:
        address = ChatAddress(pid=os.getpid(), port=_port_of(url))
        write_atomic(folder / _ADDRESS_FILE, address.to_json())
        while time.time() - _asked_at(folder) < idle_seconds:
            time.sleep(_POLL_SECONDS)


def _shared_folder(work: OpenProject) -> Path:
    return work.project.serving / CHAT / f"model-{work.model}"


def _read_names(folder: Path) -> tuple[str, ...]:
    asked = read_record(ChatNames, folder / _NAMES_FILE)
    return () if asked is None else asked.names


def _asked_at(folder: Path) -> float:
    try:
        return (folder / _NAMES_FILE).stat().st_mtime
    except OSError:
        return 0.0


def ask_in_background(
    work: OpenProject, subject: ChatSubject, messages: Sequence[Message], *, max_tokens: int | None = None
) -> ChatAnswer:
    """One answer. A process in the background keeps models of this base loaded for the next question."""
    if subject.endpoint is not None:
        with open_chat(work, subject, max_tokens=max_tokens) as chat:
            return chat.ask(messages)
    folder, settings = _shared_folder(work), chat_settings(work, subject)
    with _starting:
        port = _find_port(folder)
        # Those of an earlier process may be gone by now.
        names = () if port is None else _read_names(folder)
        make_folder(folder)
        write_atomic(folder / _NAMES_FILE, ChatNames(names=tuple({*names, subject.name})).to_json())
        port = port or _start_listening(work, folder)
    endpoint = OwnEndpoint(settings.model_copy(update={"port": port}), root=work.project.root)
    chat = Chat(
        subject=subject.name,
        model=subject.name,
        endpoint=endpoint,
        max_tokens=min(max_tokens or work.settings.evaluate.max_new_tokens, settings.max_new_tokens_limit),
        seconds=settings.request_timeout_seconds,
    )
    chat.await_model()
    return chat.ask(messages)


def _find_port(folder: Path) -> int | None:
    """The port of the background process; None if none runs."""
    address = read_record(ChatAddress, folder / _ADDRESS_FILE)
    running = address is not None and lock_holder(gateway_folder(folder)) == address.pid
    return address.port if address is not None and running else None


def _start_listening(work: OpenProject, folder: Path) -> int:
    command = [sys.executable, "-m", "graftwork.cli.main", "chat", "--listen", "-C", str(work.project.root)]
    log = folder / "chat.log"
    child = start_detached([*command, "--model", work.model], log=log, folder=work.project.root)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        ended = child.poll() is not None
        if (port := _find_port(folder)) is not None:
            return port
        if ended and lock_holder(gateway_folder(folder)) is None:
            break
        time.sleep(_POLL_SECONDS)
    lines = log.read_text(errors="replace").splitlines()[-8:]
    raise WorkerFailed(
        "the model did not start in the background",
        why="\n".join(lines) or "it left no output",
        fix="`graft chat` starts it in a terminal",
        where=str(log),
    )


def is_loaded(work: OpenProject) -> bool:
    """Whether the background process runs, so that the next answer needs no start."""
    return _find_port(_shared_folder(work)) is not None


def rate_capture(
    work: OpenProject,
    capture: str,
    score: float | None,
    comment: str = "",
    who: str = "",
    *,
    correction: str = "",
) -> None:
    """Feedback on a captured answer: 1 is good, 0 is bad, and a correction replaces it."""
    body = {"capture": capture, "score": score, "comment": comment, "user": who, "correction": correction}
    try:
        feedback = parse_feedback(json.dumps(body).encode(), at=time.time())
    except ApiError as error:
        raise UserError("this is not valid feedback", why=error.message, fix="rate an answer again") from None
    for pause in (*PAUSES, None):
        if StoreSink(work).add_feedback(feedback):
            return
        if pause is not None:
            time.sleep(pause)
    raise UserError(
        f"there is no capture {capture}", why="it was deleted", fix="ask again, and rate that answer"
    )


class Chat:
    """A conversation with one model. The caller keeps the messages."""

    def __init__(
        self,
        *,
        subject: str,
        model: str,
        endpoint: OwnEndpoint,
        max_tokens: int,
        temperature: float = 0.0,
        seconds: float,
        is_remote: bool = False,
    ) -> None:
        self._is_remote = is_remote
        self.subject, self.session = subject, f"{CHAT_SESSION}{secrets.token_hex(6)}"
        self._model, self._endpoint, self._seconds = model, endpoint, seconds
        self._decoding = {"max_tokens": max_tokens, "temperature": temperature}

    def await_model(self) -> None:
        """Wait until the model is loaded. What keeps it from being loaded is what the answer then says."""
        deadline = time.monotonic() + _LOAD_SECONDS
        while time.monotonic() < deadline:
            try:
                with self._endpoint.send("/v1/models", seconds=FEEDBACK_SECONDS) as reply:
                    if self.subject in {model["id"] for model in json.loads(reply.read())["data"]}:
                        return
            except NoAnswer as error:
                raise self._explain(str(error)) from None
            time.sleep(_POLL_SECONDS)

    def ask(
        self, messages: Sequence[Message], *, on_text: Callable[[str], object] = lambda _text: None
    ) -> ChatAnswer:
        """The answer; `on_text` gets each piece of it as it arrives."""
        body = {
            "model": self._model,
            "messages": [message.model_dump() for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._decoding,
        }
        headers = {"x-session-id": self.session}
        began = time.perf_counter()
        try:
            with self._endpoint.send(
                "/v1/chat/completions", body, seconds=self._seconds, headers=headers
            ) as reply:
                if reply.status != 200:
                    raise self._explain(_read_error(reply.read()))
                return self._read(reply, began, on_text)
        except NoAnswer as error:
            raise self._explain(str(error)) from None

    def _read(self, reply: HttpAnswer, began: float, on_text: Callable[[str], object]) -> ChatAnswer:
        pieces: list[str] = []
        finish_reason, first, usage = None, None, dict[str, Any]()
        for line in reply.lines():
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise self._explain(_read_error(data))
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                finish_reason = choice.get("finish_reason") or finish_reason
                if text := (choice.get("delta") or {}).get("content"):
                    first = first or time.perf_counter() - began
                    pieces.append(text)
                    on_text(text)
        return ChatAnswer(
            subject=self.subject,
            text="".join(pieces),
            finish_reason=finish_reason,
            prompt_tokens=usage.get("prompt_tokens"),
            reply_tokens=usage.get("completion_tokens"),
            first_token_seconds=first,
            seconds=time.perf_counter() - began,
            capture=reply.header("x-graft-capture"),
        )

    def rate(self, answer: ChatAnswer, score: float, comment: str = "") -> None:
        """Feedback on an answer: 1 is good, 0 is bad."""
        body: dict[str, Any] = {"capture": answer.capture, "score": score}
        if comment:
            body["comment"] = comment
        try:
            with self._endpoint.send("/v1/feedback", body, seconds=FEEDBACK_SECONDS) as reply:
                if reply.status != 200:
                    why = _read_error(reply.read())
                    raise EnvironmentFailure("the feedback was not stored", why=why, fix="give it again")
        except NoAnswer as error:
            raise EnvironmentFailure(
                "the feedback was not stored",
                why=str(error),
                fix="check that `graft serve` runs, and send it again",
            ) from None

    def _explain(self, why: str) -> GraftError:
        return EnvironmentFailure(
            f"{self.subject} did not answer",
            why=why,
            fix="check the URL and the key" if self._is_remote else "shorten the conversation, or ask again",
            where=self.subject,
        )


def _read_error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:2000]
    except (ValueError, KeyError, TypeError):
        return body[:300].decode(errors="replace")
