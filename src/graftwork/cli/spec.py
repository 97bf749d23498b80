"""`graft spec`: read, check, compare and convert specifications."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json, print_error, print_json, stdout
from graftwork.records.errors import GraftError, UserError
from graftwork.text.wording import plural
from graftwork.views.document import quote
from graftwork.views.terminal import print_line, table

if TYPE_CHECKING:
    from graftwork.components.check import SpecReport

app = typer.Typer(help="Read, check, compare and convert specifications.", no_args_is_help=True)

SpecFile = Annotated[Path, typer.Argument(help="A specification: a YAML tree or an outline.")]
Cases = Annotated[
    Path | None, typer.Option("--cases", help="The file of cases. Default: NAME.cases.yaml next to the spec.")
]


MOST_SHOWN = 60
"""Requirements without a case in one table."""


class SpecDialect(StrEnum):
    yaml = "yaml"
    outline = "outline"


@app.command("check")
def check(
    files: Annotated[list[Path], typer.Argument(help="Specifications, or folders of them.")],
    cases: Cases = None,
    notes: Annotated[bool, typer.Option("--notes", help="Show notes too, such as translated types.")] = False,
    json: Json = False,
) -> None:
    """Check specifications: ids, references, cycles, types, cases, and which requirements can be run.

    Exit code 0 if no file has an error, 1 if one has or is refused, 2 if a single file is no specification.
    Files with the ending .yaml or .yml in a folder may be something else: they are listed, and not counted.

    Example:  graft spec check converter.tiki
    """
    from graftwork.components.check import check_file, find_duplicates
    from graftwork.components.read import ENDINGS

    paths = [
        path
        for given in files
        for path in (
            sorted(p for p in given.rglob("*") if p.suffix in ENDINGS) if given.is_dir() else [given]
        )
        if not path.name.endswith(".cases.yaml")
    ]
    if not paths:
        raise UserError(
            "there is no specification here",
            why=f"no file ends in {', '.join(ENDINGS)}",
            fix="name a file",
            where=", ".join(map(str, files)),
        )
    reports, refused, failed = [], [], False
    for path in paths:
        try:
            reports.append(check_file(path, cases))
        except GraftError as error:
            if len(paths) == 1:
                raise
            refused.append(error)
            failed = failed or path in files or path.suffix not in (".yaml", ".yml")
    duplicates = list(find_duplicates([path for path in paths if path.is_file()]))
    if json:
        print_json(
            {
                "files": [report.model_dump(mode="json") for report in reports],
                "refused": [error.as_json() for error in refused],
                "duplicates": [finding.model_dump(mode="json") for finding in duplicates],
            }
        )
    else:
        for report in reports:
            _show_report(report, notes=notes)
        for refusal in refused:
            print_error(refusal, as_json=False)
        for finding in duplicates:
            _line(f"[yellow]warning[/] {_quote(finding.file)}: {_quote(finding.message)}")
    raise typer.Exit(1 if failed or any(report.errors for report in reports) else 0)


def _quote(text: str) -> str:

    return quote(text)


def _line(text: str) -> None:

    print_line(stdout, text)


def _show_report(report: "SpecReport", *, notes: bool) -> None:

    runs = sum(each.executable for each in report.requirements)
    _line(
        f"[bold]{quote(report.file)}[/]  {report.dialect}, {plural(report.nodes, 'node')}, "
        f"{report.leaves} {'leaf' if report.leaves == 1 else 'leaves'}, "
        f"{report.components_with_cases} with cases, "
        f"{runs} of {plural(len(report.requirements), 'requirement')} executable"
    )
    shown = [finding for finding in report.findings if notes or finding.level != "note"]
    if shown:
        rows = table("line", "level", "node", "finding", "rule", right=("line",))
        rows.columns[4].no_wrap = True
        colors = {"error": "red", "warning": "yellow", "note": "dim"}
        for finding in shown:
            level = f"[{colors[finding.level]}]{finding.level}[/]"
            rows.add_row(str(finding.line), level, quote(finding.node), quote(finding.message), finding.code)
        stdout.print(rows)
        for rule, fix in {finding.code: finding.fix for finding in shown}.items():
            _line(f"  [bold]{rule}[/]: {quote(fix)}")
    hidden = len(report.findings) - len(shown)
    if hidden:
        _line(f"[dim]{plural(hidden, 'note')} not shown: --notes lists them[/]")
    missing = [each for each in report.requirements if not each.executable]
    if missing:
        rows = table("line", "node", "requirement without a case", right=("line",))
        for each in missing[:MOST_SHOWN]:
            rows.add_row(str(each.line), quote(each.node), quote(each.text))
        stdout.print(rows)
        if len(missing) > MOST_SHOWN:
            _line(f"[dim]and {len(missing) - MOST_SHOWN} more: --json lists all[/]")


@app.command("show")
def show(file: SpecFile, json: Json = False) -> None:
    """Show the tree of a specification: nodes, inputs, outputs, dependencies.

    Example:  graft spec show converter.tiki
    """
    from graftwork.components.check import to_outline
    from graftwork.components.read import read_spec

    tree = read_spec(file)
    rows = to_outline(tree)
    if json:
        print_json({"dialect": tree.dialect, "nodes": rows})
        return
    shown = table("node", "takes", "gives", "uses", "requirements", right=("requirements",))
    shown.columns[0].no_wrap = True
    for row in rows:
        shown.add_row(
            quote("  " * row["depth"] + f"{row['id']} {row['name']}"),
            quote(", ".join(f"{name}: {kind}" if kind else name for name, kind in row["inputs"].items())),
            quote(", ".join(f"{name}: {kind}" if kind else name for name, kind in row["outputs"].items())),
            quote(", ".join(row["dependencies"])),
            str(len(row["requirements"]) or ""),
        )
    stdout.print(shown)


@app.command("diff")
def diff(
    old: Annotated[Path, typer.Argument(help="The earlier specification.")],
    new: Annotated[Path, typer.Argument(help="The later one, in either dialect.")],
    json: Json = False,
) -> None:
    """Compare two specifications node by node: added, removed, moved, changed.

    Exit code 0 if they are equivalent, 1 if not.

    Example:  graft spec diff old.tiki new.tiki
    """
    from graftwork.components.read import read_spec
    from graftwork.components.tree import diff_trees

    changes = diff_trees(read_spec(old), read_spec(new))
    if json:
        print_json({"changes": [change.model_dump(mode="json") for change in changes]})
    elif not changes:
        _line("the specifications say the same")
    else:
        rows = table("change", "node", "key", "old", "new")
        for change in changes:
            values = ["" if value is None else str(value)[:80] for value in (change.old, change.new)]
            rows.add_row(
                change.kind, quote(f"{change.node} {change.name}"), quote(change.key), *map(quote, values)
            )
        stdout.print(rows)
    raise typer.Exit(1 if changes else 0)


@app.command("convert")
def convert(
    file: SpecFile,
    to: Annotated[SpecDialect, typer.Option("--to", help="The dialect to write.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Default: print it.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a specification in the other dialect; everything but YAML comments is kept.

    A JSON Schema or an OpenAPI document can be read too. An existing file is never overwritten.

    Example:  graft spec convert converter.tiki --to outline -o converter.outline
    """
    import sys

    from graftwork.components.read import parse_spec, read_any, write_spec
    from graftwork.components.tree import same_tree
    from graftwork.files.disk import write_atomic

    tree = read_any(file)
    text = write_spec(tree, to.value)
    lossless = same_tree(tree, parse_spec(text, where=str(out or file)))
    if out is not None:
        if out.exists():
            raise UserError("this file exists already", fix="name another one", where=str(out))
        write_atomic(out, text)
    if json:
        print_json(
            {"dialect": to.value, "lossless": lossless, "out": str(out) if out else None, "text": text}
        )
    elif out is None:
        sys.stdout.write(text)
    else:
        _line(f"wrote {_quote(str(out))}; read back, it says the same: {'yes' if lossless else 'no'}")
    raise typer.Exit(0 if lossless else 1)
