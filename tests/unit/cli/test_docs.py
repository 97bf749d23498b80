"""Commands, output, paths and links in the docs and in the messages of the source."""

import ast
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from graftwork.cli import output
from graftwork.cli.main import app, main
from graftwork.plan.lint.project import RULES
from graftwork.project.settings import ProjectSettings

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "graftwork"
ANSWERS = ROOT / "docs" / "answers"
README = (ROOT / "README.md").read_text()
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
_FENCED = re.compile(r"^```(\w*)\n([\s\S]*?)^```$", re.MULTILINE)
_UsageError: Any = typer.BadParameter.__base__


# Commands exist, with their options and arguments.

command_tree = cache(lambda: typer.main.get_command(app))


def misuse_of(line: str) -> str | None:
    """What is wrong with a shown command `graft …`; None if it parses.

    It may leave values out, and have a word in capitals for one.
    """
    command: Any = command_tree()
    shown = re.split(r" +(?:\||&&|;|>|--|#|·) ", f"{line} ")[0]
    words = shlex.split(re.sub(r"[…[\]]", "", shown))[1:]
    context = command.make_context("graft", [], resilient_parsing=True)
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        subcommand = command.get_command(context, words[0])
        if subcommand is None:
            break
        command, words = subcommand, words[1:]
    if hasattr(command, "get_command") and words and not words[0].startswith("-"):
        return None if words[0].isupper() else f"no command {words[0]!r}"
    try:
        _, rest, _ = command.make_parser(command.context_class(command)).parse_args(list(words))
    except _UsageError as error:
        # The last option may leave its value out.
        return None if error.message == f"Option {words[-1]!r} requires an argument." else error.message
    return f"unexpected argument {rest[0]!r}" if rest else None


@pytest.mark.parametrize(
    ("command", "misuse"),
    [
        ("graft run --model X", "No such option: --model"),
        ("graft data nothing", "no command 'nothing'"),
        ("graft status now", "unexpected argument 'now'"),
        ("graft release ab --metric", None),
        ("graft gate --junit gate.xml && echo x", None),
        ("graft data …", None),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command, misuse):
    assert misuse_of(command) == misuse


def commands_in_page(text: str) -> list[str]:
    """The commands in the blocks of a page, without comments and prompts."""
    blocks = [block for language, block in _FENCED.findall(text) if language in ("", "console", "bash", "sh")]
    lines = (line for block in blocks for line in block.replace("\\\n", " ").splitlines())
    commands = (line.removeprefix("$ ").split(" #")[0].strip() for line in lines)
    return [line for line in commands if line and not line.startswith("#")]


def inline_commands(text: str) -> list[str]:
    """`graft …` in running text and tables; of "a | b" the first command is checked."""
    spans = re.findall(r"(?<!`)`(graft [^`\n]+)`", _FENCED.sub("", text))
    return [re.split(r" \\?\| ", span)[0].replace("…", "").strip() for span in spans]


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; `\\0` stands for a value that is put into one."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in child.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.List) and ast.unparse(child).startswith("['graft', "):
            words = (part for part in child.elts if not isinstance(part, ast.Starred))
            yield " ".join(str(word.value) if isinstance(word, ast.Constant) else "\0" for word in words)
        else:
            yield from texts_in(child)


def commands_in_source(path: Path) -> Iterator[str]:
    text = path.read_text()
    if path.suffix != ".py":
        yield from re.findall(r'(?<=[`"])graft [^`"<{]+|(?<=<code>)graft [^<{]+', text)
    elif "graft " in text or '"graft"' in text:
        for string in texts_in(ast.parse(text)):
            for pattern in (r"`(graft [^`]+)`", r"\A(graft [^`;,(]+)", r"^ *Example: +(graft .+)$"):
                yield from re.findall(pattern, string, re.M)


def test_every_command_in_the_docs_exists_with_its_options():
    lines = {
        (page, line)
        for page, text in PAGES.items()
        for line in (*commands_in_page(text), *inline_commands(text))
        if line.startswith("graft ")
    }
    assert len(lines) > 300
    assert [f"{page}: {line}: {misuse}" for page, line in sorted(lines) if (misuse := misuse_of(line))] == []


def test_every_command_in_messages_pages_and_help_of_the_source_exists_with_its_options():
    files = (path for kind in ("*.py", "*.jinja", "*.js") for path in SOURCE.rglob(kind))
    shown = {
        (path.relative_to(SOURCE).as_posix(), re.sub(r"(?<=\w)\0+", "", text).replace("\0", "VALUE"))
        for path in files
        if "vendor" not in path.parts
        for text in commands_in_source(path)
    }
    assert len(shown) > 300
    # Of a test suite and of an engine: these are not run.
    names = {"graft gate VALUE", "graft train on one GPU"}
    assert [
        f"{path}: {line}: {misuse}"
        for path, line in sorted(shown)
        if line not in names and (misuse := misuse_of(line))
    ] == []


# The README.


def test_the_readme_uses_only_programs_that_linux_and_macos_have():
    first_words = {line.split()[0] for line in commands_in_page(README)}
    assert first_words <= {"make", "python3", "pip", "graft", "curl", ".", "export"}


def test_the_makefile_has_every_target_that_the_readme_names():
    targets = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)))
    assert "demo" in targets
    subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, check=True, timeout=300)


def test_every_extra_that_a_page_installs_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for text in PAGES.values() for name in re.findall(r'"\.\[(\w+)\]"', text)}
    assert {"train", "serve"} <= named <= set(extras)
    assert [page for page, text in PAGES.items() if re.search(r"pip install[^`\n]*graftwork\[", text)] == []


README_RUNS = [line for line in commands_in_page(README) if line.startswith("graft ")]


@pytest.mark.parametrize("line", README_RUNS)
def test_a_command_of_the_readme_runs_as_written(tmp_path, monkeypatch, capsys, line):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(re.split(r" \| | && | -- ", line)[0]))
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    # 1 is an answer as well: the log of the example must not be trained on as it is.
    assert ended.value.code in (0, 1, None), printed.err
    assert printed.out
    assert Path("audit.html").is_file() == ("--html" in line)


def test_the_settings_that_the_serving_page_shows_are_valid():
    for block in re.findall(r"```yaml\n(.*?)```", PAGES["docs/serving.md"], re.S):
        ProjectSettings.model_validate({"project": "p", "data": {"logs": ["x"]}, **yaml.safe_load(block)})


# Paths and links.


def test_every_link_of_a_page_leads_to_a_file_that_exists():
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
    assert [
        f"{page}: {target}"
        for page, text in PAGES.items()
        for target in link.findall(text)
        if not (ROOT / page).parent.joinpath(target).exists()
    ] == []


def test_architecture_page_names_every_package_and_only_paths_that_exist():
    page = PAGES["docs/architecture.md"]
    named = re.findall(r"`([a-z_]+/(?:[a-z_]+/?)*(?:\.py)?)`", page)
    paths = [name for name in named if not name.startswith(("src/", "tests/"))]
    assert len(paths) > 20
    assert [path for path in paths if not (SOURCE / path).exists()] == []
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert sorted(name for name in packages if f"`{name}/`" not in page) == []


def test_extending_page_names_only_files_and_lines_that_exist():
    rows = re.findall(
        r"^\| [^|]+ \| ([^|]+) \| `(\w+)` in ([^|]+) \| ([^|]+) \|$", PAGES["docs/extending.md"], re.M
    )
    assert len(rows) >= 10
    for like, line, where, tests in rows:
        files = re.findall(r"`([\w/]+\.py)`", like + where)
        assert [file for file in files if not (SOURCE / file).is_file()] == []
        assert [path for path in re.findall(r"`(tests/[\w/.]+)`", tests) if not (ROOT / path).exists()] == []
        source = (SOURCE / files[-1]).read_text()
        assert re.search(rf"^(def )?{line}\b( =|:|\()", source, re.M), f"{files[-1]} does not define {line}"


def test_every_number_of_a_decision_has_a_page_or_is_called_unused():
    folder = ROOT / "docs" / "decisions"
    pages = sorted(int(page.name[:4]) for page in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text()
    unused = re.search(r"The numbers ([0-9, and]+) are not used", index)
    assert unused, "the page does not name numbers that are not used"
    missing = sorted(set(range(1, pages[-1] + 1)) - set(pages))
    assert [int(number) for number in re.findall(r"\d{4}", unused[1])] == missing
    assert [int(number) for number in re.findall(r"^\| \[(\d{4})\]", index, re.M)] == pages


# Pages that show commands with their output. A block of `console` begins with the command and is run again;
# what stands in any other block is not. What `graft plan buy` prints takes too long: it has its date.


class Shown(NamedTuple):
    command: str
    lines: tuple[str, ...]


class Printed(NamedTuple):
    lines: tuple[str, ...]
    failed: bool


@cache
def shown_in(name: str) -> list[Shown]:
    blocks = re.findall(
        r"^```console\n\$ graft (.+)\n([\s\S]*?)^```$", (ANSWERS / f"{name}.md").read_text(), re.M
    )
    return [Shown(command, tuple(filter(None, text.splitlines()))) for command, text in blocks]


@cache
def printed_by(command: str) -> Printed:
    """What `graft COMMAND` prints, at the width of the pages; each is run once."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as captured:
        patched.chdir(ROOT)
        patched.setattr(sys, "argv", ["graft", *shlex.split(command)])
        patched.setattr(output.stdout, "_width", 118)
        with pytest.raises(SystemExit) as ended:
            main()
    lines = (line.rstrip() for line in captured.getvalue().splitlines())
    return Printed(tuple(filter(None, lines)), bool(ended.value.code))


def astray(shown: Shown, printed: Printed) -> list[str]:
    """Lines that are not printed, or not where the page has them; `…` marks what is left out."""
    position, marked, wrong = 0, False, []
    for line in shown.lines:
        if line == "…":
            marked = True
            continue
        here = next((n for n in range(position, len(printed.lines)) if printed.lines[n] == line), None)
        if here is None or (here > position and not marked):
            wrong.append(line)
        position, marked = position if here is None else here + 1, False
    if position < len(printed.lines) and not marked:
        wrong.append("(the rest)")
    return wrong


@pytest.mark.parametrize("page", ["16gb", "dual-gpu", "environments", "configurations"])
def test_a_page_shows_what_is_printed_and_marks_what_it_leaves_out(page):
    assert shown_in(page)
    for shown in shown_in(page):
        printed = printed_by(shown.command)
        assert astray(shown, printed) == [], shown.command
        assert page == "configurations" or printed.failed is shown.lines[0].startswith("✗"), shown.command


def test_every_line_that_the_page_about_six_managers_shows_is_printed():
    assert len(shown_in("federation")) > 8
    for shown in shown_in("federation"):
        printed = printed_by(shown.command)
        assert [line for line in shown.lines if line not in printed.lines] == [], shown.command
        assert printed.failed is shown.lines[0].startswith("✗"), shown.command


@pytest.mark.parametrize(
    ("name", "units", "other", "computed"),
    [
        # Seconds of a step by its two prompts; the bytes of all tokens.
        ("16gb", "GiB|h|min|s|days|tokens/s", "docs/benchmarks.md", {"102", "5.3", "6.3", "0.1"}),
        ("dual-gpu", "GiB|h|min|s|days|tokens/s", "docs/answers/16gb.md", set()),
        ("federation", "GiB|s|min", None, set()),
    ],
)
def test_every_figure_of_the_text_is_in_an_output(name, units, other, computed):
    content = PAGES[f"docs/answers/{name}.md"]
    text = _FENCED.sub("", content)
    outputs = " ".join([*(block for _, block in _FENCED.findall(content)), PAGES[other] if other else ""])
    figures = re.findall(rf"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) (?:{units})(?!\w)", text)
    assert len(figures) > 10
    unshown = {
        figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\.?\d)", outputs)
    }
    assert unshown <= computed


@pytest.mark.parametrize(("name", "headings"), [("16gb", 8), ("dual-gpu", 7)])
def test_every_section_of_the_questions_has_its_answer(name, headings):
    numbers = re.findall(r"^## (\d)\. ", PAGES[f"docs/answers/{name}.md"], re.MULTILINE)
    assert numbers == [str(number) for number in range(1, headings + 1)]


def test_the_index_names_every_answer():
    index = PAGES["docs/answers/README.md"]
    assert [page.name for page in ANSWERS.glob("*.md") if f"]({page.name})" not in index] == ["README.md"]


def test_the_page_about_configurations_has_every_rule_and_every_file():
    page = PAGES["docs/answers/configurations.md"]
    assert [rule.id for rule in RULES if f"| `{rule.id}` | {rule.severity} |" not in page] == []
    shown = " ".join(block.command for block in shown_in("configurations"))
    files = (ROOT / "tests" / "data" / "lint").iterdir()
    assert [file.name for file in files if file.name not in shown] == []


def test_the_figures_of_places_and_gpus_that_the_text_compares_are_those_of_today():
    command = shown_in("environments")[0].command
    rows = json.loads("\n".join(printed_by(f"{command} --value 1000 --success 0.8 --json").lines))["rows"]
    page = PAGES["docs/answers/environments.md"]
    text = _FENCED.sub("", page)
    on_demand = {(row["place"], row["instance"]): row for row in rows if row["billing"] == "on-demand"}
    for place, instance, cost, runs, ratio in (
        ("runpod", "1x_A100-80GB_SECURE", "$2.87 (2.32–3.56)", "174 (A100 80GB PCIe)", "278 times the cost"),
        ("runpod", "1x_RTX4090_SECURE", "$2.50", "200 at $0.74", ""),
        ("huggingface-spaces", "a10g-small", "$9.60", "52 (small)", "82 on HF's"),
        ("huggingface-spaces", "a10g-large", "$14.40", "34 (large)", ""),
        ("sagemaker", "ml.g5.xlarge", "$13.56", "36; managed", ""),
        ("azure-ml", "Standard_NC24ads_A100_v4", "$8.10", "61", ""),
    ):
        row = on_demand[place, instance]
        assert all(figure in text for figure in (cost, runs, ratio))
        assert cost.startswith(f"${row['cost_usd']['value']:.2f}")
        assert re.match(rf"{row['runs_in_budget']['value']:.0f}\b", runs)
        assert not ratio or ratio.startswith(f"{row['return_ratio']['value']:.0f} ")
    hours = {(row["gpu"], row["gpus"]): row["training_hours"]["value"] for row in rows}
    shown = re.search(r"A100 80GB ([\d.]+), RTX 4090 ([\d.]+), A10G ([\d.]+), V100 ([\d.]+)", page)
    assert shown is not None
    gpus = ("A100 80GB", "RTX 4090", "A10G", "V100 16GB")
    assert [f"{hours[gpu, 1]:.1f}" for gpu in gpus] == list(shown.groups())
