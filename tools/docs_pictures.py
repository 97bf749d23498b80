"""Makes every picture in docs/images.

    python tools/docs_pictures.py [--demo FOLDER] [--project FOLDER] [NAME ...]

In: the project of `make demo` after it has run, for the report; a project for the web page, by default one
that `tests/unit/web/web_project.py` makes; Debian's chromium. Out: compressed PNG files.
"""

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
DEMO = ROOT / "examples" / "cited_answers"
LARGEST_BYTES = 300_000
sys.path.insert(0, str(ROOT / "tests" / "unit" / "web"))


@dataclass(frozen=True)
class Shot:
    """What the browser opens, and the window that it opens it in."""

    path: str
    scheme: str
    width: int
    height: int
    waits_for: str = ""


REPORT = {"report": Shot("report.html", "light", 1180, 1480)}
PAGE = {
    "web-overview": Shot("/?check=1", "light", 1280, 1130, "figure.chart canvas"),
    "web-run": Shot("/runs/{run}", "dark", 1280, 760, "figure.chart canvas"),
    "web-case": Shot("/evaluation/cases/{case}?outcome=won", "light", 1280, 800),
    "web-cycle": Shot("/cycle", "light", 1280, 760),
    "web-escalation": Shot("/evaluation/escalation", "dark", 1280, 1250),
    "web-phone": Shot("/evaluation", "dark", 390, 760),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="Pictures to make. Default: all.")
    parser.add_argument("--demo", type=Path, default=DEMO, help="A project in which `make demo` has run.")
    parser.add_argument("--project", type=Path, help="A project for the web page.")
    asked = parser.parse_args()
    names = asked.names or [*REPORT, *PAGE]
    unknown = [name for name in names if name not in REPORT | PAGE]
    if unknown:
        parser.error(f"no such picture: {', '.join(unknown)}; there are {', '.join(REPORT | PAGE)}")
    if "report" in names and not (asked.demo / "report.html").exists():
        parser.error(f"{asked.demo} has no report.html: run `make demo` first, or name --demo")
    with tempfile.TemporaryDirectory() as scratch, open_browser() as browser:
        if "report" in names:
            take(browser, "report", REPORT["report"], (asked.demo / "report.html").resolve().as_uri())
        if wanted := [name for name in names if name in PAGE]:
            take_page(browser, wanted, asked.project or make(Path(scratch)))


def make(scratch: Path) -> Path:
    from web_project import make_project

    return make_project(scratch / "corner-shop").root


@contextmanager
def open_browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def take_page(browser: Any, names: Sequence[str], folder: Path) -> None:
    from served_page import serve
    from web_extras import working_run

    from graftwork.api.evaluations import CaseQuery, list_cases
    from graftwork.api.project import open_project

    project = open_project(folder)
    case = list_cases(project, CaseQuery(outcome="won")).cases[1].id
    with project.open() as work, working_run(work) as run, serve(folder) as page:
        key, _, value = page.cookie.partition("=")
        cookie = {"name": key, "value": value, "url": page.base}
        for name in names:
            shot = PAGE[name]
            take(browser, name, shot, page.base + shot.path.format(run=run, case=case), cookie)


def take(browser: Any, name: str, shot: Shot, url: str, cookie: dict[str, str] | None = None) -> None:
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme=shot.scheme,
        reduced_motion="reduce",
    )
    if cookie is not None:
        context.add_cookies([cookie])
    tab = context.new_page()
    tab.goto(url, wait_until="load")
    if shot.waits_for:
        tab.wait_for_selector(shot.waits_for)
    picture = compress(tab.screenshot())
    context.close()
    assert len(picture) < LARGEST_BYTES, (name, len(picture))
    (IMAGES / f"{name}.png").write_bytes(picture)
    print(f"{name}.png  {len(picture) / 1000:.0f} KB")


def compress(picture: bytes) -> bytes:
    """The picture with 256 colours, which suffice for text and plots."""
    from PIL import Image

    out = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
