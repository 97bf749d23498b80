"""`graft generate`: components from a specification, their provenance, and episodes for training."""

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, has_subcommand, print_record
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import UserError
from graftwork.text.wording import plural
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graftwork.components.attempts import OnProgress
    from graftwork.components.cases import Stage
    from graftwork.components.settings import GenerateSettings
    from graftwork.project.open_project import OpenProject

app = typer.Typer(invoke_without_command=True, no_args_is_help=True)

Spec = Annotated[Path | None, typer.Option("--spec", help="The specification.")]
Cases = Annotated[
    Path | None, typer.Option("--cases", help="The file of cases. Default: NAME.cases.yaml next to the spec.")
]
Generated = Annotated[Path, typer.Argument(help="The folder that `graft generate --out` wrote.")]


@app.callback()
def generate(
    context: typer.Context,
    spec: Spec = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="The model that answers: an OpenAI-compatible endpoint as URL#model,key=VARIABLE, base (the "
            "embedded model), run:ID, release:ID or champion of a project, engine:llamacpp@base, or "
            "recorded:FILE.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the package.")] = Path("generated"),
    cases: Cases = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="Only this component or node, everything below it, and its dependencies. Repeatable.",
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per stage.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds with feedback.")] = None,
    stages: Annotated[str, typer.Option("--stages", help="Stages to run, such as 1 or 1,2.")] = "1,2,3,4",
    max_tokens: Annotated[
        int | None, typer.Option("--max-total-tokens", min=1, help="Stop after this many tokens in total.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option("--max-minutes", help="Stop after this many minutes.")
    ] = None,
    judge: Annotated[
        bool, typer.Option("--judge", help="Also ask evaluate.judge; its score decides nothing.")
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Generate components from a specification: in four stages, verified in the sandbox, with score cards.

    Every attempt is kept, and the same command resumes. Exit code 0 if all components pass their gates, 1 if
    not, 75 if the budget is spent.

    Example:  graft generate --spec converter.tiki --engine recorded:answers.jsonl --out generated
    """
    if has_subcommand(context):
        return
    from graftwork.components.project import ComponentRequest, generate_components

    if spec is None or engine is None:
        missing = "--spec" if spec is None else "--engine"
        raise UserError(f"{missing} is missing", fix="see `graft generate --help`", where=missing)
    from graftwork.components.settings import GenerateOptions

    own = {"samples": samples, "rounds": rounds}
    chosen_stages = _read_stages(stages)
    if not json:
        _warn(spec, cases)
    with _settings(project, progress=not json) as (settings, work, on_progress):
        chosen = GenerateOptions(
            **settings.model_dump(), **{name: value for name, value in own.items() if value is not None}
        )
        request = ComponentRequest(
            spec,
            engine,
            out,
            chosen,
            cases,
            tuple(only or ()),
            chosen_stages,
            judge,
            max_total_tokens=max_tokens,
            max_minutes=max_minutes,
        )
        outcome = generate_components(request, work=work, on_progress=on_progress)
    print_record(outcome, as_json=json, ok=outcome.ok)
    raise typer.Exit(0 if outcome.ok else 1)


def _warn(spec: Path, cases: Path | None) -> None:
    """Summarize in one line what `graft spec check` finds."""
    from graftwork.components.check import check_file

    report = check_file(spec, cases)
    found = [each for each in report.findings if each.level != "note"]
    if found:
        shown = f"{plural(len(found), 'finding')} in the specification: `graft spec check {spec}` shows them"
        print_line(stderr, f"[yellow]![/] {quote(shown)}", soft_wrap=True)


@contextmanager
def _settings(
    project: Path | None, *, progress: bool = False
) -> "Iterator[tuple[GenerateSettings, OpenProject | None, OnProgress]]":
    """Return the settings of the project if there is one, else the defaults."""
    from graftwork.cli.progress import RichReporter
    from graftwork.components.settings import GenerateSettings
    from graftwork.process.worker import stoppable
    from graftwork.project.folder import find_project
    from graftwork.project.reporter import progress_listener

    with ExitStack() as stack:
        stack.enter_context(stoppable())
        listener = progress_listener(stack.enter_context(RichReporter(tables=False)))
        on_progress: OnProgress = listener if progress else lambda _phase, _done, _total: None
        if project is None and find_project() is None:
            yield GenerateSettings(), None, on_progress
            return
        from graftwork.api.project import open_project

        work = stack.enter_context(open_project(project).open())
        yield work.project.settings.generate, work, on_progress


def _read_stages(text: str) -> "tuple[Stage, ...]":
    from graftwork.components.stages import STAGES

    parts = {part.strip() for part in text.split(",") if part.strip()}
    chosen = tuple(stage for stage in STAGES if str(stage) in parts)
    if len(chosen) != len(parts) or 1 not in chosen:
        raise UserError(
            f"{text!r} names no stages", why="they begin with 1", fix="write 1,2,3,4", where="--stages"
        )
    return chosen


@app.command("verify")
def verify(
    out: Generated,
    spec: Spec = None,
    cases: Cases = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Check that a package is what its journal says: spec, prompts, model, answers, verdicts, files.

    With --spec every component is also run again. Exit code 0 if every link holds, 1 if not.

    Example:  graft generate verify generated --spec converter.tiki
    """
    from graftwork.components.project import verify_components

    with _settings(project) as (_, work, _):
        report = verify_components(out, spec=spec, cases=cases, work=work)
    print_record(report, as_json=json, ok=report.ok)
    raise typer.Exit(0 if report.ok else 1)


@app.command("episodes")
def episodes(
    out: Generated,
    spec: Annotated[Path, typer.Option("--spec", help="The specification.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")] = Path("episodes"),
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            "--held-out", help="A component or node that becomes evaluation cases only. Repeatable."
        ),
    ] = None,
    cases: Cases = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write attempts as training data: interactions with stage and reward, pairs, prompts for rollouts.

    Example:  graft generate episodes generated --spec converter.tiki --to logs --held-out 5
    """
    from graftwork.components.project import write_episodes

    with _settings(project) as (_, work, _):
        written = write_episodes(out, spec=spec, to=to, cases=cases, held_out=held_out or (), work=work)
    print_record(written, as_json=json)


@app.command("report")
def report(
    out: Generated,
    against: Annotated[
        Path | None, typer.Option("--against", help="An earlier generation, by the model before training.")
    ] = None,
    json: Json = False,
) -> None:
    """Show pass@1 by stage; with --against, before and after training.

    Example:  graft generate report after --against before
    """
    from graftwork.components.project import read_rates
    from graftwork.components.session import compare_rates
    from graftwork.views.components import view_compared_rates, view_rates

    rates = read_rates(out)
    if against is None:
        if json:
            listed = [
                {**rate.model_dump(), "pass_at_1": rate.pass_at_1, "pass_at_n": rate.pass_at_n}
                for rate in rates
            ]
            print_json({"stages": listed})
        else:
            print_document(stdout, view_rates(rates))
        return
    rows = compare_rates(read_rates(against), rates)
    if json:
        print_json({"stages": rows})
    else:
        print_document(stdout, view_compared_rates(rows))
