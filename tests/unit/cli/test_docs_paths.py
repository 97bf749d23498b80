"""Paths and links in the docs exist."""

import re

import pytest
from shown_commands import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def test_architecture_page_names_only_paths_that_exist():
    named = re.findall(
        r"`([a-z_]+/(?:[a-z_]+/?)*(?:\.py)?)`", (ROOT / "docs" / "architecture.md").read_text()
    )
    paths = [name for name in named if not name.startswith(("src/", "tests/"))]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / "src" / "graftwork" / path).exists()] == []


def test_extending_page_names_only_files_and_lines_that_exist():
    page = (ROOT / "docs" / "extending.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(\w+)` in ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert len(rows) >= 10
    for like, line, where, tests in rows:
        files = re.findall(r"`([\w/]+\.py)`", like + where)
        assert [file for file in files if not (ROOT / "src" / "graftwork" / file).is_file()] == []
        assert [path for path in re.findall(r"`(tests/[\w/.]+)`", tests) if not (ROOT / path).exists()] == []
        source = (ROOT / "src" / "graftwork" / files[-1]).read_text()
        assert re.search(rf"^(def )?{line}\b( =|:|\()", source, re.M), f"{files[-1]} does not define {line}"


def test_architecture_page_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "src" / "graftwork").glob("*/__init__.py")}
    assert sorted(name for name in packages if f"`{name}/`" not in page) == []


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_of_a_page_lead_to_files_that_exist(page):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_number_of_a_decision_has_a_page_or_is_called_unused():
    folder = ROOT / "docs" / "decisions"
    pages = sorted(int(page.name[:4]) for page in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text()
    unused = re.search(r"The numbers ([0-9, and]+) are not used", index)
    assert unused, "the page does not name numbers that are not used"
    missing = sorted(set(range(1, pages[-1] + 1)) - set(pages))
    assert [int(number) for number in re.findall(r"\d{4}", unused[1])] == missing
    assert [int(number) for number in re.findall(r"^\| \[(\d{4})\]", index, re.M)] == pages
