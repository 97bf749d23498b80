"""`graft gate`: deploy, iterate or abort; and between training sessions, which checkpoint to go on from."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graftwork.coordinate.workplace import Workplace
    from graftwork.records.verdict import NextStart, Verdict

Junit = Annotated[
    Path | None, typer.Option("--junit", help="Write a JUnit file too: one test case a rule.", metavar="FILE")
]
Everything = Annotated[
    bool, typer.Option("--all", help="Every model of graft.yaml, corrected for how many are tried.")
]
Session = Annotated[
    bool,
    typer.Option(
        "--session", help="Does the next training start from this checkpoint (exit 0) or the one before (1)?"
    ),
]


def gate(
    project: Folder = None,
    model: Model = None,
    everything: Everything = False,
    session: Session = False,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Decide by the rules in graft.yaml. Exit codes: 0 deploy, 10 iterate, 11 abort, 12 not enough evidence.

    What is out of date is done first, training too: `graft status` says what that is.

    Example:  graft gate --junit gate.xml && echo "ship it"
    """
    if everything and (model is not None or session):
        raise typer.BadParameter("--all goes with neither --model nor --session")
    if session:
        if junit is not None:
            raise typer.BadParameter("--session has no verdict to write: --junit does not go with it")
        _show_session(project, model, as_json=json)
    elif everything:
        _show_all(project, junit, as_json=json)
    else:
        _show_one(project, model, junit, as_json=json)


def _show_one(project: Path | None, model: str | None, junit: Path | None, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json
    from graftwork.cli.steps import run_upto
    from graftwork.records.verdict import Verdict

    verdict = run_upto("gate", project=project, model=model).get("gate", Verdict)
    _write(junit, {model or "main": verdict})
    if as_json:
        print_json(verdict)
    else:
        _print(verdict)
    raise typer.Exit(verdict.exit_code)


def _show_all(project: Path | None, junit: Path | None, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.coordinate.gate_all import gate_all

    with _opened(project, None) as work:
        gated = gate_all(work)
    _write(junit, gated.verdicts)
    if as_json:
        print_json(gated)
    else:
        for name, verdict in gated.verdicts.items():
            print_line(stdout, f"[bold]{quote(name)}[/]")
            _print(verdict)
    raise typer.Exit(gated.exit_code)


def _show_session(project: Path | None, model: str | None, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json
    from graftwork.coordinate.gate_session import judge_session
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

    with _opened(project, model) as work:
        found = judge_session(work)
    if as_json:
        print_json(found)
    else:
        _print_session(found)
    raise typer.Exit(0 if found.start == "this" else EXIT_ANSWER_IS_NO)


@contextmanager
def _opened(project: Path | None, model: str | None) -> "Iterator[Workplace]":
    from graftwork.cli.narrate import RichNarrator
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.process.stopping import stoppable
    from graftwork.project.folder import open_project

    found = open_project(project)
    with (
        stoppable(),
        RichNarrator(tables=False) as narrator,
        open_workplace(found, narrator, model=model) as work,
    ):
        yield work


def _write(junit: Path | None, verdicts: "Mapping[str, Verdict]") -> None:
    if junit is None:
        return
    from graftwork.files.whole import write_whole
    from graftwork.report.junit import write_junit

    junit.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_whole(junit, write_junit(verdicts))


def _print(verdict: "Verdict") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show import show
    from graftwork.cli.show.tables import print_line, quote

    show(stdout, verdict)
    for note in verdict.notes:
        print_line(stdout, f"[yellow]![/] {quote(note)}")


def _print_session(found: "NextStart") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.evaluation import OUTCOMES
    from graftwork.cli.show.tables import print_line, quote, table

    words = "GO ON FROM THIS ONE" if found.start == "this" else "GO BACK TO THE ONE BEFORE"
    colour = "green" if found.start == "this" else "yellow"
    print_line(stdout, f"[bold {colour}]{words}[/]  {quote(found.reason)}")
    rows = table("rule", "", "why")
    for rule in found.rules:
        rows.add_row(quote(rule.rule), OUTCOMES[rule.outcome], quote(rule.sentence))
    if found.rules:
        stdout.print(rows)
    if found.adapter_folder:
        print_line(stdout, f"train.start_from: {quote(found.adapter_folder)}", soft_wrap=True)
    elif not found.adapter_hash:
        print_line(stdout, "train.start_from: leave it out; the session began at the base itself")
    else:
        print_line(stdout, f"the adapter {quote(found.adapter_hash[:12])} lies in no run or release any more")
