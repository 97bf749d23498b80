"""Templates of the page, and what all pages share: navigation, filters, values of addresses, who is looking.

In: a request and values. Out: HTML. Everything that is put in is escaped; only plots arrive as markup.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from graftwork.api.overview import mark_project
from graftwork.api.project import Project, current_user, open_project
from graftwork.records.errors import GraftError
from graftwork.text.wording import plural
from graftwork.version import __version__
from graftwork.views import templates as report_templates
from graftwork.web.options import WebOptions
from graftwork.web.security import own_path

WHO_COOKIE = "graft_who"
LONGEST_NAME = 60


NAVIGATION = (
    ("", (("/", "Overview"),)),
    (
        "Train",
        (
            ("/data", "Data"),
            ("/plan", "Plan"),
            ("/runs", "Runs"),
            ("/evaluation", "Evaluation"),
            ("/releases", "Releases"),
        ),
    ),
    ("Serve", (("/captures", "Captures"), ("/playground", "Playground"), ("/review", "Review"))),
    ("Schedule", (("/cycle", "Cycle"), ("/fleet", "Fleet"), ("/week", "Week"))),
    ("More", (("/components", "Components"), ("/actions", "Log"))),
)
"""Groups of sections, in the order of the work."""


def project_of(request: Request) -> Project:
    """The project as it is on disk now; of the model that the address names."""
    options: WebOptions = request.app.state.options
    return open_project(options.root, model=model_of(request) or None)


def model_of(request: Request) -> str:
    """The model of the project that the address names. In plans, `model` is a model of the catalog."""
    return "" if request.url.path.startswith("/plan") else request.query_params.get("model", "")


def who_of(request: Request) -> str:
    """Who acts: the name that the visitor gave, or the user that the server runs as."""
    return unquote(request.cookies.get(WHO_COOKIE, "")).strip()[:LONGEST_NAME] or current_user()


def render(
    request: Request, template: str, *, title: str, section: str = "", code: int = 200, **values: Any
) -> HTMLResponse:
    options: WebOptions = request.app.state.options
    page = {
        "title": title,
        "section": section,
        "navigation": NAVIGATION,
        "allow_actions": options.allow_actions,
        "who": who_of(request),
        "root": str(options.root),
        "folder": options.root.name,
        "version": __version__,
        "here": _here(request),
        "acted": request.method == "POST",
        "path": request.scope["path"],
        "model": model_of(request),
        "notice": request.query_params.get("notice", ""),
        "asset": asset,
        "mark": lambda: read_mark(options.root),
    }
    body = environment().get_template(template).render(page=page, **values)
    return HTMLResponse(body, status_code=code, headers={"cache-control": "no-store"})


def read_mark(root: Path) -> str:
    """What the project looks like now; streams report when it is another one."""
    try:
        return mark_project(open_project(root))
    except GraftError as error:
        # graft.yaml is being edited: the page shows the error itself.
        return f"error-{hashlib.sha256(error.what.encode()).hexdigest()[:12]}"


def _here(request: Request) -> str:
    """The address of this page without the notice of the last action; of an action, the page it came from."""
    if request.method == "POST":
        return _came_from(request)
    query = [(key, value) for key, value in request.query_params.multi_items() if key != "notice"]
    return own_path(request.scope["path"]) + (f"?{urlencode(query)}" if query else "")


def _came_from(request: Request) -> str:
    """The page of this server that holds the form; the first one where that is not known."""
    came = urlsplit(request.headers.get("referer", ""))
    if came.netloc != request.headers.get("host"):
        return "/"
    query = [(key, value) for key, value in parse_qsl(came.query) if key != "notice"]
    return own_path(unquote(came.path)) + (f"?{urlencode(query)}" if query else "")


@cache
def environment() -> Environment:
    found = Environment(
        loader=PackageLoader("graftwork", "web/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(report_templates.FILTERS)
    found.filters.update(FILTERS)
    found.globals["address"] = address
    return found


@cache
def asset(name: str) -> str:
    """The address of a static file; it changes with its content, so that browsers may keep it."""
    return f"/static/{name}?v={hashlib.sha256(read_static(name)).hexdigest()[:10]}"


@cache
def read_static(name: str) -> bytes:
    """A static file by its name; the style sheet of the reports is shared."""
    if name == "page.css":
        return files("graftwork.views").joinpath("page.css").read_bytes()
    return files("graftwork.web").joinpath("static").joinpath(name).read_bytes()


def address(path: str, **query: Any) -> str:
    """A path of this page with the values that are not empty as its query."""
    given = {key: value for key, value in query.items() if value not in ("", None) and value is not False}
    return own_path(path) + (f"?{urlencode(given)}" if given else "")


def when(moment: str | float | None) -> Markup | str:
    """A time as people read it, with the exact one in its title: 3 min ago."""
    if moment in (None, ""):
        return "never"
    at = _parse(moment)
    if at is None:
        return str(moment)
    stamp = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        stamp.isoformat(timespec="seconds"), stamp.strftime("%Y-%m-%d %H:%M:%S"), ago(time.time() - at, stamp)
    )


def _parse(moment: str | float | None) -> float | None:
    if isinstance(moment, int | float):
        return float(moment)
    try:
        parsed = datetime.fromisoformat(str(moment))
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def ago(seconds: float, stamp: datetime) -> str:
    if seconds < -5:
        return stamp.strftime("%d %b %H:%M")
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 23.5 * 3600:
        return f"{seconds / 3600:.0f} h ago"
    if seconds < 30 * 86400:
        days = round(seconds / 86400)
        return f"{plural(days, 'day')} ago"
    return stamp.strftime("%d %b %Y")


def clip(text: str | None, length: int = 160) -> str:
    """One line of a text."""
    folded = " ".join((text or "").split())
    return folded if len(folded) <= length else f"{folded[: length - 1]}…"


def sentence(text: str) -> str:
    """The text with a capital letter at its start, unless it starts with a command or the name of a model."""
    first = text.partition(" ")[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() else text


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def usd(amount: float | None) -> str:
    if amount is None:
        return "–"
    return f"${amount:,.2f}" if abs(amount) < 1000 else f"${amount:,.0f}"


def plain(value: Any) -> str:
    """A value of settings as graft.yaml would have it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) or "none"
    return str(value)


def score(value: float | None) -> str:
    """A grade of an answer: right, wrong, or a share."""
    if value is None:
        return "–"
    return {0.0: "✗", 1.0: "✓"}.get(float(value), f"{value:.2f}")


FILTERS: dict[str, Callable[..., Any]] = {
    "when": when,
    "clip": clip,
    "sentence": sentence,
    "size": size,
    "usd": usd,
    "plain": plain,
    "score": score,
}


def number_in(request: Request, name: str, default: int = 1) -> int:
    """A whole number of the address; the default where it is none."""
    try:
        return int(request.query_params.get(name, ""))
    except ValueError:
        return default


def text_in(request: Request, name: str, *, longest: int = 400) -> str:
    return request.query_params.get(name, "").strip()[:longest]
