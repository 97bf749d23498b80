"""`graft spec`: read, check, compare and convert specifications."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json, print_error, print_json, stdout
from graftwork.records.errors import UserError
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line

app = typer.Typer(help="Read, check, compare and convert specifications.", no_args_is_help=True)

SpecFile = Annotated[Path, typer.Argument(help="A specification: a YAML tree or an outline.")]
Cases = Annotated[
    Path | None, typer.Option("--cases", help="The file of cases. Default: NAME.cases.yaml next to the spec.")
]


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

    Exit code 0 if no file has an error, 1 if one has or is refused, 2 if a single file is not a
    specification. Files with the ending .yaml or .yml in a folder may be something else: they are listed, and
    not counted.

    Example:  graft spec check converter.tiki
    """
    from graftwork.components.check import check_files
    from graftwork.views.components import view_spec_report

    checked = check_files(files, cases)
    if json:
        print_json(checked.as_json())
    else:
        for report in checked.reports:
            print_document(stdout, view_spec_report(report, notes=notes))
        for refusal in checked.refused:
            print_error(refusal, as_json=False)
        for finding in checked.duplicates:
            print_line(stdout, f"[yellow]warning[/] {quote(finding.file)}: {quote(finding.message)}")
    raise typer.Exit(checked.exit_code)


@app.command("show")
def show(file: SpecFile, json: Json = False) -> None:
    """Show the tree of a specification: nodes, inputs, outputs, dependencies.

    Example:  graft spec show converter.tiki
    """
    from graftwork.components.check import to_outline
    from graftwork.components.read import read_spec
    from graftwork.views.components import view_spec_tree

    tree = read_spec(file)
    rows = to_outline(tree)
    if json:
        print_json({"dialect": tree.dialect, "nodes": rows})
    else:
        print_document(stdout, view_spec_tree(rows))


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
    from graftwork.views.components import view_spec_changes

    changes = diff_trees(read_spec(old), read_spec(new))
    if json:
        print_json({"changes": [change.model_dump(mode="json") for change in changes]})
    else:
        print_document(stdout, view_spec_changes(changes))
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
            raise UserError("this file already exists", fix="specify another one", where=str(out))
        write_atomic(out, text)
    if json:
        print_json(
            {"dialect": to.value, "lossless": lossless, "out": str(out) if out else None, "text": text}
        )
    elif out is None:
        sys.stdout.write(text)
    else:
        print_line(
            stdout, f"wrote {quote(str(out))}; read back, it says the same: {'yes' if lossless else 'no'}"
        )
    raise typer.Exit(0 if lossless else 1)
