"""The endpoint: asked as a client would ask it, and what it has served, capture by capture and in figures.

The address is that of graft.yaml on this machine; no other host is asked. The text of captures is as users
and models wrote it.
"""

import json
import re
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, get_args

from graftwork.api.project import PAGE_SIZE, Page, Project, number_page
from graftwork.data import capture_export
from graftwork.data.capture_export import (
    CaptureQuery,
    ExportedCaptures,
    FeedbackFilter,
    ListedCapture,
    OutputFormat,
)
from graftwork.data.capture_export import read_prompt as read_prompt  # noqa: PLC0414
from graftwork.evaluate.chat import (
    ChatChoice,
    ask_in_background,
    count_examples,
    find_chat_subject,
    is_loaded,
    list_chat_subjects,
    rate_capture,
    read_example,
)
from graftwork.process.http_client import HttpAnswer, NoAnswer
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.interaction import CHAT_SESSION, Capture, Feedback, Message
from graftwork.records.report import Case
from graftwork.serve.captures import CaptureTotals, read_totals
from graftwork.store.captures import FeedbackStore
from graftwork.text.options import apply_options

if TYPE_CHECKING:
    from graftwork.serve.settings import ServeSettings

ASK_SECONDS = 120.0
LIST_SECONDS = 10.0
"""Timeout for an endpoint on a busy machine; if none listens, that is known at once."""
CAPTURE_HEADER = "x-graft-capture"
SHOWN_HEADERS = (
    "x-graft-release",
    "x-graft-route",
    CAPTURE_HEADER,
    "x-graft-replica",
    "x-graft-escalation",
    "x-graft-fallback",
    "retry-after",
)


class EndpointAnswer(Record):
    """The response, whatever its status. `error` says why there is no answer."""

    model: str
    status: int | None = None
    text: str = ""
    error: str = ""
    headers: dict[str, str] = {}
    seconds: float = 0.0
    prompt_tokens: int | None = None
    reply_tokens: int | None = None


class EndpointCounts(Record):
    """The endpoint's counters since it was started."""

    requests: int = 0
    errors: int = 0
    """Requests that ended with a status of 500 or more."""
    refused: int = 0
    """Requests that ended with a status from 400 to 499."""
    fallbacks: int = 0
    """Requests that another model answered, because the one that was asked for could not."""


_SAMPLE = re.compile(r"^(graft_requests_total|graft_fallbacks_total)\{(.*)\} (\d+)$")
_STATUS = re.compile(r'status="(\d+)"')


def read_endpoint_counts(project: Project) -> EndpointCounts | None:
    """None if nothing answers, or if its counters are not accessible to this reader."""
    try:
        with _open(project, "/metrics", None, seconds=LIST_SECONDS) as reply:
            return parse_counts(reply.read().decode()) if reply.status == 200 else None
    except (NoAnswer, ValueError, EnvironmentFailure):
        return None


def parse_counts(text: str) -> EndpointCounts:
    """Parse the endpoint's metrics in the Prometheus text format; skip the others."""
    requests = errors = refused = fallbacks = 0
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        count, status = int(sample[3]), _STATUS.search(sample[2])
        if sample[1] == "graft_fallbacks_total":
            fallbacks += count
            continue
        code = int(status[1]) if status else 0
        requests += count
        errors += count if code >= 500 else 0
        refused += count if 400 <= code < 500 else 0
    return EndpointCounts(requests=requests, errors=errors, refused=refused, fallbacks=fallbacks)


def list_endpoint_models(project: Project) -> tuple[str, ...] | None:
    """The names that requests may use now; None if nothing answers."""
    try:
        with _open(project, "/v1/models", None, seconds=LIST_SECONDS) as reply:
            body = json.loads(reply.read())
            return tuple(str(model["id"]) for model in body.get("data", ()))
    except (NoAnswer, ValueError, KeyError, TypeError, AttributeError, EnvironmentFailure):
        return None


class Playground(Record):
    """Who can be asked: models of the running endpoint, and what is started in the background for it."""

    served: tuple[str, ...] | None
    """None if no endpoint answers."""
    subjects: tuple[ChatChoice, ...]
    is_loaded: bool
    """Whether the background process is already running."""
    examples: int


def read_playground(project: Project) -> Playground:
    served = list_endpoint_models(project)
    with project.open() as work:
        return Playground(
            served=served,
            subjects=list_chat_subjects(work),
            is_loaded=is_loaded(work),
            examples=count_examples(work),
        )


def read_chat_example(project: Project, number: int) -> Case:
    with project.open() as work:
        return read_example(work, number)


def ask_any(
    project: Project, names: Iterable[str], messages: list[dict[str, str]], *, max_tokens: int = 256
) -> list[EndpointAnswer]:
    """Ask each as `read_playground` lists it: the running endpoint if it serves the name, else a process in
    the background. No other host than those of graft.yaml is asked."""
    playground = read_playground(project)
    choices = {choice.name: choice for choice in playground.subjects}

    def ask(name: str) -> EndpointAnswer:
        if name in (playground.served or ()):
            return ask_model(project, name, messages, max_tokens=max_tokens)
        choice = choices.get(name)
        if choice is None:
            why = f"nothing answers as {name} now; choose one of the list, or start `graft serve`"
            return EndpointAnswer(model=name, error=why)
        if choice.why_not:
            return EndpointAnswer(model=name, error=f"{name} cannot answer: {choice.why_not}")
        return _ask_in_background(project, name, messages, max_tokens=max_tokens)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask, names))


def _ask_in_background(
    project: Project, name: str, messages: list[dict[str, str]], *, max_tokens: int
) -> EndpointAnswer:
    turns = [Message.model_validate(message) for message in messages]
    try:
        with project.open() as work:
            answer = ask_in_background(work, find_chat_subject(work, name), turns, max_tokens=max_tokens)
    except GraftError as error:
        return EndpointAnswer(model=name, error=f"{error.what}: {error.why}" if error.why else error.what)
    return EndpointAnswer(
        model=name,
        status=200,
        text=answer.text,
        headers={} if answer.capture is None else {CAPTURE_HEADER: answer.capture},
        seconds=answer.seconds,
        prompt_tokens=answer.prompt_tokens,
        reply_tokens=answer.reply_tokens,
    )


def rate_answer(project: Project, capture: str, score: float, comment: str = "", who: str = "") -> None:
    """Feedback on a captured answer: 1 is good, 0 is bad."""
    with project.open() as work:
        rate_capture(work, capture, score, comment, who)


def correct_answer(project: Project, capture: str, correction: str, comment: str = "", who: str = "") -> None:
    """Feedback that replaces a captured answer."""
    served, _ = read_capture(project, capture)
    if correction.strip() in ("", served.reply.strip()):
        raise UserError(
            "the answer was not changed", why="a correction must differ", fix="edit the answer, or rate it"
        )
    with project.open() as work:
        rate_capture(work, capture, None, comment, who, correction=correction)


def ask_model(
    project: Project, model: str, messages: list[dict[str, str]], *, max_tokens: int = 256
) -> EndpointAnswer:
    """Ask a model of the endpoint; the exchange is captured as any other."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    began = time.perf_counter()
    try:
        session = {"x-session-id": f"{CHAT_SESSION}{secrets.token_hex(6)}"}
        with _open(project, "/v1/chat/completions", body, seconds=ASK_SECONDS, headers=session) as reply:
            content = reply.read()
            status = reply.status
            headers = {name: value for name in SHOWN_HEADERS if (value := reply.header(name))}
    except NoAnswer as error:
        return EndpointAnswer(
            model=model, error=f"nothing answers: {error}; `graft serve` starts the endpoint"
        )
    except EnvironmentFailure as error:
        return EndpointAnswer(model=model, error=error.what)
    answer = EndpointAnswer(model=model, status=status, headers=headers, seconds=time.perf_counter() - began)
    try:
        found = json.loads(content)
        if status >= 400:
            message = str(found.get("error", {}).get("message", found))[:2000]
            return answer.model_copy(update={"error": message})
        usage, text = found.get("usage") or {}, str(found["choices"][0]["message"].get("content") or "")
        tokens = {"prompt_tokens": usage.get("prompt_tokens"), "reply_tokens": usage.get("completion_tokens")}
        return answer.model_copy(update={"text": text, **tokens})
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return answer.model_copy(update={"error": f"status {status}, and the body is not a chat completion"})


def curl_command(
    project: Project, model: str, messages: list[dict[str, str]], *, address: str | None = None
) -> str:
    """The same request as a shell command, at the address of the settings or at this one."""
    body = json.dumps({"model": model, "messages": messages}, ensure_ascii=False)
    url = f"{address or ask_address(project)}/v1/chat/completions"
    certificate = project.settings.serve.tls_certificate
    trusted = ["--cacert", str(project.root / certificate)] if certificate is not None else []
    return shlex.join(["curl", url, *trusted, "-H", "Content-Type: application/json", "-d", body])


def describe_start(
    project: Project, settings: "ServeSettings", url: str
) -> tuple[tuple[str, ...], str, bool]:
    """The names that requests to a running endpoint may use, the default first; a request to try, as a curl
    command; and whether clients need a key. `settings` are those that it was started with."""
    from graftwork.serve.keys import is_usable
    from graftwork.serve.project import needs_base
    from graftwork.serve.settings import is_loopback

    with project.open() as work:
        own = [*work.releases.aliases()]
        if settings.engine.kind == "endpoint" or needs_base(work, settings):
            own.append("base")
        has_keys = any(is_usable(key) for key in work.api_keys.list())
    family = [] if settings.family is None else [settings.family.name]
    names = [*settings.models, *family, *settings.chains, *own]
    default = settings.default_model
    models = tuple(dict.fromkeys([default, *names] if default in names else names))
    needs_key = has_keys or settings.api_key_env is not None or not is_loopback(settings.host)
    question = [{"role": "user", "content": "Hello"}]
    curl = curl_command(project, models[0], question, address=url)
    if needs_key:
        curl += f' -H "Authorization: Bearer ${settings.api_key_env or "GRAFT_KEY"}"'
    return models, curl, needs_key


def ask_address(project: Project) -> str:
    from graftwork.serve.own_endpoint import OwnEndpoint

    return OwnEndpoint(project.settings.serve, root=project.root).url


def _open(
    project: Project,
    path: str,
    body: dict[str, object] | None,
    *,
    seconds: float,
    headers: Mapping[str, str] = {},
) -> AbstractContextManager[HttpAnswer]:
    from graftwork.serve.own_endpoint import OwnEndpoint

    endpoint = OwnEndpoint(project.settings.serve, root=project.root, admin=path == "/metrics")
    if not endpoint.is_here:
        raise EnvironmentFailure(
            "the endpoint's address is not fixed on this machine", fix="set serve.host and serve.port"
        )
    return endpoint.send(path, body, seconds=seconds, headers=headers)


MOST_EXCHANGES = 2000
_OPTIONS = {"models": "model", "checks": "check"}
"""Options whose names differ from those of the fields."""
CAPTURES_COMMAND = "graft data captures"
FEEDBACK_FILTERS: tuple[FeedbackFilter, ...] = get_args(FeedbackFilter)


class Traffic(Record):
    """Statistics of the last exchanges. Shares are None if there are none."""

    exchanges: int = 0
    since: str | None = None
    until: str | None = None
    by_release: dict[str, int] = {}
    by_day: dict[str, int] = {}
    total_ms: dict[str, float] | None = None
    """Percentiles: p50, p95 and p99."""
    first_token_ms: dict[str, float] | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    escalated: int = 0
    disconnected: int = 0
    cut_off: int = 0
    """Answers that ended because they reached the limit of tokens."""
    failed_checks: dict[str, int] = {}
    arms: dict[str, int] = {}
    """Exchanges of an experiment, by champion and challenger."""


def list_captures(project: Project, *, page: int = 1) -> tuple[Page[Capture], dict[str, int]]:
    """List a page of all captures, newest first. Also the number of captures per release."""
    with project.open() as work:
        total = work.captures.count()
        page, pages = number_page(page, total)
        found = work.captures.page(limit=PAGE_SIZE, offset=(page - 1) * PAGE_SIZE)
        shown = Page[Capture](items=found, total=total, page=page, pages=pages)
        return shown, work.captures.count_by_release()


def to_query(fields: Mapping[str, str]) -> CaptureQuery:
    """The filters of `graft data captures` from text; empty fields select all."""
    values: dict[str, Any] = {name: value for name, value in fields.items() if value}
    for name in ("models", "checks"):
        if name in values:
            values[name] = (values[name],)
    return apply_options(CaptureQuery(), values, command=CAPTURES_COMMAND, options=_OPTIONS)


def captures_command(fields: Mapping[str, str], *, feedback: str = "") -> str:
    options = {name: value for name, value in {**fields, "feedback": feedback}.items() if value}
    words = [
        word
        for name, value in options.items()
        for word in (f"--{_OPTIONS.get(name, name.replace('_', '-'))}", value)
    ]
    return shlex.join([*CAPTURES_COMMAND.split(), *words])


def select_captures(
    project: Project, query: CaptureQuery, *, feedback: str = "", page: int = 1
) -> Page[ListedCapture]:
    """A page of the captures that a query selects, newest first, as `graft data captures` lists them."""
    with project.open() as work:
        settings = work.settings.data.captures
        listed = capture_export.list_captures(
            work,
            settings,
            feedback=_to_feedback(feedback or settings.feedback),
            query=query,
            limit=PAGE_SIZE,
            page=max(page, 1),
        )
    pages = number_page(page, listed.count)[1]
    return Page[ListedCapture](items=listed.captures, total=listed.count, page=max(page, 1), pages=pages)


def write_captures(
    project: Project, query: CaptureQuery, *, file: str, feedback: str = "", output_format: str = "log"
) -> ExportedCaptures:
    """Write selected captures as `graft data captures --out` does, to a new file in the project's folder."""
    form = next((form for form in get_args(OutputFormat) if form == output_format), None)
    if form is None:
        raise UserError(
            f"{output_format!r} is no format", fix=f"use one of {', '.join(get_args(OutputFormat))}"
        )
    file = "".join(filter(str.isprintable, file))
    path, root = (project.root / file).resolve(), project.root.resolve()
    is_inside = path.is_relative_to(root)
    is_hidden = is_inside and any(part.startswith(".") for part in path.relative_to(root).parts)
    if path.suffix != ".jsonl" or is_hidden or not is_inside:
        raise UserError(
            f"{file!r} is not a file that captures are written to here",
            why="it must be a JSONL file in the folder of the project",
            fix="name one such as logs/captured.jsonl",
        )
    if path.exists():
        raise UserError(
            f"{file} exists already", why="a log must not be lost", fix="choose another name", where=str(path)
        )
    with project.open() as work:
        settings = work.settings.data.captures
        return capture_export.export_captures(
            work,
            path,
            settings,
            feedback=_to_feedback(feedback or settings.feedback),
            query=query,
            output_format=form,
        )


def _to_feedback(name: str) -> FeedbackFilter:
    chosen = next((kind for kind in FEEDBACK_FILTERS if kind == name), None)
    if chosen is None:
        raise UserError(f"{name!r} is no kind of feedback", fix=f"use one of {', '.join(FEEDBACK_FILTERS)}")
    return chosen


def read_capture(project: Project, capture_id: str) -> tuple[Capture, tuple[Feedback, ...]]:
    """A capture with its feedback."""
    with project.open() as work:
        capture = work.captures.get(capture_id)
        if capture is None:
            raise UserError(
                f"there is no capture {capture_id}",
                why="it was deleted, or the id is of another project",
                fix="choose one from the list of captures",
            )
        store = FeedbackStore(work.database, project=work.settings.project)
        return capture, tuple(store.of_capture(capture_id))


def read_traffic(project: Project) -> Traffic:
    """Figures of the last exchanges."""
    with project.open() as work:
        return summarize_traffic(work.captures.page(limit=MOST_EXCHANGES))


def read_capture_totals(project: Project) -> CaptureTotals | None:
    """Count what became of all exchanges that were to be captured; None if nothing was served yet."""
    return read_totals(project.folder.serving)


def summarize_traffic(captures: Sequence[Capture]) -> Traffic:
    """Summarize captures, given newest first."""
    if not captures:
        return Traffic()
    first_tokens = [capture.first_token_ms for capture in captures if capture.first_token_ms is not None]
    return Traffic(
        exchanges=len(captures),
        since=captures[-1].at,
        until=captures[0].at,
        by_release=dict(Counter(capture.release for capture in captures).most_common()),
        by_day=dict(sorted(Counter(capture.at[:10] for capture in captures).items())),
        total_ms=_percentiles([capture.total_ms for capture in captures]),
        first_token_ms=_percentiles(first_tokens),
        prompt_tokens=sum(capture.prompt_tokens for capture in captures),
        reply_tokens=sum(capture.reply_tokens for capture in captures),
        escalated=sum(capture.escalated_from is not None for capture in captures),
        disconnected=sum(capture.disconnected for capture in captures),
        cut_off=sum(capture.finish_reason == "length" for capture in captures),
        failed_checks=dict(
            Counter(capture.failed_check for capture in captures if capture.failed_check).most_common()
        ),
        arms=dict(Counter(capture.arm for capture in captures if capture.arm)),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return {f"p{at}": ordered[min(at * len(ordered) // 100, len(ordered) - 1)] for at in (50, 95, 99)}
