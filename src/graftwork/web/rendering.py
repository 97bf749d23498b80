"""Templates of the page, and what all pages share: navigation, filters, values of addresses, who is looking.

Input: a request and values. Output: HTML. Everything that is put in is escaped; only plots arrive as markup.
"""

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse

from graftwork.api.overview import find_used_parts, mark_project
from graftwork.api.project import Project, current_user, open_project
from graftwork.records.errors import GraftError
from graftwork.version import __version__
from graftwork.views import html
from graftwork.web.security import own_path

WHO_COOKIE = "graft_who"
LONGEST_NAME = 60


NAVIGATION: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("", (("/", "Overview"),)),
    (
        "Train",
        (
            ("/data", "Data"),
            ("/plan", "Plan"),
            ("/runs", "Runs"),
            ("/evaluation", "Evaluation"),
            ("/releases", "Releases"),
            ("/components", "Components"),
        ),
    ),
    ("Serve", (("/captures", "Captures"), ("/playground", "Playground"), ("/review", "Review"))),
    ("Schedule", (("/cycle", "Cycle"), ("/fleet", "Fleet"), ("/week", "Week"))),
)
"""Groups of sections, in the order of the work."""
LOG = ("/actions", "Log")
OCCASIONAL = {"/components": "components", "/cycle": "cycle", "/fleet": "fleet", "/week": "week"}
"""Sections that not every project needs, by their names in `find_used_parts`."""


class Navigation(NamedTuple):
    """`more` are folded away: sections that the project does not use yet."""

    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    more: tuple[tuple[str, str], ...]


def make_navigation(root: Path) -> Navigation:
    try:
        used = find_used_parts(open_project(root))
    except GraftError:
        used = frozenset()
    shown = [
        (group, tuple(link for link in links if OCCASIONAL.get(link[0], "") in {"", *used}))
        for group, links in NAVIGATION
    ]
    left = tuple(
        link for _, links in NAVIGATION for link in links if OCCASIONAL.get(link[0], "") not in {"", *used}
    )
    return Navigation(tuple((group, links) for group, links in shown if links), (*left, LOG))


def project_of(request: Request) -> Project:
    """The current project on disk, for the model in the address."""
    return open_project(request.app.state.root, model=model_of(request) or None)


def model_of(request: Request) -> str:
    """The model of the project that the address names. In plans, `model` is a model of the catalog."""
    return "" if request.url.path.startswith("/plan") else request.query_params.get("model", "")


def who_of(request: Request) -> str:
    """Who acts: the name that the visitor gave, or the user that the server runs as."""
    return unquote(request.cookies.get(WHO_COOKIE, "")).strip()[:LONGEST_NAME] or current_user()


def render(
    request: Request, template: str, *, title: str, section: str = "", code: int = 200, **values: Any
) -> HTMLResponse:
    root: Path = request.app.state.root
    page = {
        "title": title,
        "section": section,
        "navigation": lambda: make_navigation(root),
        "allow_actions": request.app.state.allow_actions,
        "who": who_of(request),
        "root": str(root),
        "folder": root.name,
        "version": __version__,
        "here": _here(request),
        "acted": request.method == "POST",
        "path": request.scope["path"],
        "model": model_of(request),
        "notice": request.query_params.get("notice", ""),
        "asset": asset,
        "mark": lambda: read_mark(root),
    }
    body = environment().get_template(template).render(page=page, **values)
    return HTMLResponse(body, status_code=code, headers={"cache-control": "no-store"})


def read_mark(root: Path) -> str:
    """A fingerprint of the project's current state; streams report when it changes."""
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
    """The page of this server with the form; the overview if unknown."""
    came = urlsplit(request.headers.get("referer", ""))
    if came.netloc != request.headers.get("host"):
        return "/"
    query = [(key, value) for key, value in parse_qsl(came.query) if key != "notice"]
    return own_path(unquote(came.path)) + (f"?{urlencode(query)}" if query else "")


@cache
def environment() -> Environment:
    found = html.templates("web/templates")
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


def number_in(request: Request, name: str, default: int = 1) -> int:
    """A whole number of the address; the default if it is not one."""
    try:
        return int(request.query_params.get(name, ""))
    except ValueError:
        return default


def text_in(request: Request, name: str, *, longest: int = 400) -> str:
    return request.query_params.get(name, "").strip()[:longest]
