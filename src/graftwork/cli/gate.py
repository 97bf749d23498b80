"""`graft gate`: deploy, iterate or abort; and which checkpoint the next training session starts from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from graftwork.cli.command import Folder, Model, print_record, reporting
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_NEGATIVE_RESULT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graftwork.evaluate.commands import GatedAll
    from graftwork.records.report import Verdict

Junit = Annotated[
    Path | None,
    typer.Option("--junit", help="Also write a JUnit file with one test case per rule.", metavar="FILE"),
]
AllModels = Annotated[
    bool, typer.Option("--all", help="Every model in graft.yaml, corrected for multiple comparisons.")
]
Update = Annotated[
    bool,
    typer.Option("--update", help="First run the steps that are out of date, including training."),
]
Session = Annotated[
    bool,
    typer.Option(
        "--session",
        help="Choose where the next session starts: this checkpoint (exit 0) or the previous one (1).",
    ),
]


Engine = Annotated[
    str | None,
    typer.Option(
        help="Judge the adapter as served by this engine (llamacpp), set up as in serve.engine.",
        metavar="KIND",
    ),
]
ReleaseName = Annotated[
    str | None,
    typer.Option("--release", help="With --engine or --family: judge this release or alias instead."),
]


Family = Annotated[
    bool,
    typer.Option(
        "--family",
        help="Judge the family of serve.family as a whole, through the real endpoint. With --release: as it "
        "would be with that release live.",
    ),
]


def gate(
    project: Folder = None,
    model: Model = None,
    everything: AllModels = False,
    session: Session = False,
    engine: Engine = None,
    family: Family = False,
    release: ReleaseName = None,
    update: Update = False,
    junit: Junit = None,
    json: Json = False,
) -> None:
    """Decide by the rules in graft.yaml. Exit codes: 0 deploy, 10 iterate, 11 abort, 12 not enough evidence.

    The gate judges what was trained and evaluated; it does not train. If a step is out of date, it names the
    step and exits with code 3. Use `--update` to run the step first.

    Example:  graft gate --junit gate.xml && echo "ship it"
    Example:  graft gate --engine llamacpp --release champion
    Example:  graft gate --family --release 3f2a
    """
    if family:
        if everything or session or engine is not None or update:
            raise typer.BadParameter("--family cannot be combined with --all, --session, --engine, --update")
        with reporting(project, model) as opened:
            verdict = opened.gate_family(release=release)
        _finish(verdict, {"family": verdict}, junit, as_json=json)
    if everything and (model is not None or session):
        raise typer.BadParameter("--all cannot be combined with --model or --session")
    if engine is not None:
        if everything or session:
            raise typer.BadParameter("--engine cannot be combined with --all or --session")
        from graftwork.cli.serve import revise_engine

        with reporting(project, model) as opened:
            chosen = revise_engine(opened.settings.serve, engine).engine
            verdict = opened.gate_engine(chosen, release=release, update=update)
        _finish(verdict, {f"{model or 'main'} on {engine}": verdict}, junit, as_json=json)
    elif release is not None:
        raise typer.BadParameter("--release needs --engine or --family")
    elif session:
        if junit is not None:
            raise typer.BadParameter("--session gives no verdict: it cannot be combined with --junit")
        with reporting(project, model) as opened:
            found = opened.gate_session(update=update)
        print_record(found, as_json=json)
        raise typer.Exit(0 if found.start == "this" else EXIT_NEGATIVE_RESULT)
    elif everything:
        with reporting(project) as opened:
            gated = opened.gate_all(update=update)
        _finish(gated, gated.verdicts, junit, as_json=json)
    else:
        with reporting(project, model) as opened:
            verdict = opened.gate(update=update)
        _finish(verdict, {model or "main": verdict}, junit, as_json=json)


def _finish(
    gated: "Verdict | GatedAll", verdicts: "Mapping[str, Verdict]", junit: Path | None, *, as_json: bool
) -> NoReturn:
    _write(junit, verdicts)
    print_record(gated, as_json=as_json)
    raise typer.Exit(gated.exit_code)


def _write(junit: Path | None, verdicts: "Mapping[str, Verdict]") -> None:
    if junit is None:
        return
    from graftwork.files.disk import write_atomic
    from graftwork.views.evaluation import write_junit

    junit.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(junit, write_junit(verdicts))
