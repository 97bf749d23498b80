"""`graft gate`: deploy, iterate or abort; and between training sessions, which checkpoint to go on from."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, Model
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from graftwork.pipeline.open_project import OpenProject
    from graftwork.records.verdict import NextStart, Verdict

Junit = Annotated[
    Path | None, typer.Option("--junit", help="Write a JUnit file too: one test case a rule.", metavar="FILE")
]
AllModels = Annotated[
    bool, typer.Option("--all", help="Every model of graft.yaml, corrected for how many are tried.")
]
Update = Annotated[
    bool,
    typer.Option("--update", help="First do what is out of date, training and evaluation too."),
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
    everything: AllModels = False,
    session: Session = False,
    update: Update = False,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Decide by the rules in graft.yaml. Exit codes: 0 deploy, 10 iterate, 11 abort, 12 not enough evidence.

    It judges what was trained and evaluated, and never starts a training by itself: where something is out
    of date it says what (exit code 3), and `--update` does it first.

    Example:  graft gate --junit gate.xml && echo "ship it"
    """
    if everything and (model is not None or session):
        raise typer.BadParameter("--all goes with neither --model nor --session")
    if session:
        if junit is not None:
            raise typer.BadParameter("--session has no verdict to write: --junit does not go with it")
        _show_session(project, model, update=update, as_json=json)
    elif everything:
        _show_all(project, junit, update=update, as_json=json)
    else:
        _show_one(project, model, junit, update=update, as_json=json)


def _show_one(
    project: Path | None, model: str | None, junit: Path | None, *, update: bool, as_json: bool
) -> None:
    from graftwork.cli.output import print_json
    from graftwork.pipeline.table import run_pipeline
    from graftwork.records.verdict import Verdict

    with _opened(project, model) as work:
        may_do = _require_fresh(work, "gate", update=update)
        verdict = run_pipeline(work, upto="gate", may_do=may_do).get("gate", Verdict)
    _write(junit, {model or "main": verdict})
    if as_json:
        print_json(verdict)
    else:
        _print(verdict)
    raise typer.Exit(verdict.exit_code)


def _require_fresh(work: "OpenProject", upto: str, *, update: bool) -> "Collection[str] | None":
    """The steps that may be done: all where an update was asked for, else only the judging itself."""
    from graftwork.pipeline.status import require_fresh

    if update:
        return None
    named = f" --model {work.model}" if work.asked_model is not None else ""
    kind = " --session" if upto == "evaluate" else ""
    require_fresh(work, upto=upto, update=f"graft gate{named}{kind} --update")
    return ("gate",)


def _show_all(project: Path | None, junit: Path | None, *, update: bool, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.pipeline.evaluation_commands import gate_all

    with _opened(project, None) as work:
        may_do = None
        for name in work.project.settings.all_models:
            may_do = _require_fresh(replace(work, asked_model=name), "gate", update=update)
        gated = gate_all(work, may_do=may_do)
    _write(junit, gated.verdicts)
    if as_json:
        print_json(gated)
    else:
        for name, verdict in gated.verdicts.items():
            print_line(stdout, f"[bold]{quote(name)}[/]")
            _print(verdict)
    raise typer.Exit(gated.exit_code)


def _show_session(project: Path | None, model: str | None, *, update: bool, as_json: bool) -> None:
    from graftwork.cli.output import print_json
    from graftwork.pipeline.evaluation_commands import judge_session
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

    with _opened(project, model) as work:
        found = judge_session(work, may_do=_require_fresh(work, "evaluate", update=update))
    if as_json:
        print_json(found)
    else:
        _print_session(found)
    raise typer.Exit(0 if found.start == "this" else EXIT_ANSWER_IS_NO)


@contextmanager
def _opened(project: Path | None, model: str | None) -> "Iterator[OpenProject]":
    from graftwork.cli.progress import RichReporter
    from graftwork.pipeline.open_project import use_project
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    found = open_project(project)
    with (
        stoppable(),
        RichReporter(tables=False) as reporter,
        use_project(found, reporter, model=model) as work,
    ):
        yield work


def _write(junit: Path | None, verdicts: "Mapping[str, Verdict]") -> None:
    if junit is None:
        return
    from graftwork.files.disk import write_atomic
    from graftwork.report.junit import write_junit

    junit.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(junit, write_junit(verdicts))


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
