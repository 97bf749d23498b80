"""Commands in the README and the docs: the README's run as written, all others exist with their options."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shown_commands import ROOT, misuse_of

from graftwork.cli.main import main

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n([\s\S]*?)^```$", re.MULTILINE)
SHELLS = ("", "console", "bash", "sh")
# Programs that Linux and macOS both have where this installs.
PORTABLE = {"make", "python3", "pip", "graft", "curl", ".", "export"}


def commands_in(text):
    """The commands in the blocks of a page, without comments and prompts."""
    blocks = [block for language, block in _FENCED.findall(text) if language in SHELLS]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = (line.removeprefix("$ ").split(" #")[0].strip() for line in lines)
    return [line for line in found if line and not line.startswith("#")]


def inline_commands(text):
    """`graft …` in running text and tables; of "a | b" the first command is checked."""
    spans = re.findall(r"(?<!`)`(graft [^`\n]+)`", _FENCED.sub("", text))
    return [re.split(r" \\?\| ", span)[0].replace("…", "").strip() for span in spans]


def graft_words(line):
    """What is given to `graft` up to the first pipe, or to a command that it runs; None for others."""
    words = shlex.split(line.partition(" | ")[0].partition(" && ")[0].partition(" -- ")[0])
    return words[1:] if words and words[0] == "graft" else None


GRAFT_LINES = sorted(
    {
        (page.relative_to(ROOT).as_posix(), line)
        for page in PAGES
        for line in (*commands_in(page.read_text()), *inline_commands(page.read_text()))
        if line.startswith("graft ")
    }
)
README_RUNS = [line for line in commands_in(README) if line.startswith("graft ")]


def test_the_readme_uses_only_programs_that_linux_and_macos_have():
    first_words = {line.split()[0] for line in commands_in(README)}
    assert first_words <= PORTABLE


def test_the_makefile_has_every_target_that_the_readme_names():
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert "demo" in targets
    for target in sorted(targets):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr


def test_every_extra_that_a_page_installs_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r'"\.\[(\w+)\]"', page.read_text())}
    assert {"train", "serve"} <= named <= set(extras)
    assert not [page.name for page in PAGES if re.search(r"pip install[^`\n]*graftwork\[", page.read_text())]


@pytest.mark.parametrize(("page", "line"), GRAFT_LINES, ids=[f"{page}: {line}" for page, line in GRAFT_LINES])
def test_a_command_of_the_docs_exists_with_its_options(page, line):
    assert misuse_of(line) is None, page


@pytest.mark.parametrize("line", README_RUNS)
def test_a_command_of_the_readme_runs_as_written(tmp_path, monkeypatch, capsys, line):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graft", *graft_words(line)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    # 1 is an answer as well: the log of the example must not be trained on as it is.
    assert ended.value.code in (0, 1, None), output.err
    assert output.out
    assert Path("audit.html").is_file() == ("--html" in line)


def test_the_settings_that_the_serving_page_shows_are_valid():
    import yaml

    from graftwork.project.settings import ProjectSettings

    page = (ROOT / "docs" / "serving.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", page, re.S):
        given = {"data": {"logs": ["x"]}, **yaml.safe_load(block)}
        ProjectSettings.model_validate({"project": "p", **given})
