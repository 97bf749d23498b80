"""`graft eval` and its commands: measure subjects on held-out cases, and what they cost."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.command import (
    Engine,
    Folder,
    Model,
    has_subcommand,
    opened_with_progress,
    print_record,
    reporting,
)
from graftwork.cli.output import Json, print_json, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT, NegativeResult
from graftwork.views.document import quote
from graftwork.views.terminal import print_line

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def evaluate(
    context: typer.Context,
    project: Folder = None,
    model: Model = None,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject",
            help="What to evaluate: base, adapter, adapter:FOLDER, run:ID, release:ID, champion, log, or an "
            "OpenAI-compatible endpoint as URL#model,key=VARIABLE. Repeatable: the first is the baseline, "
            "the second the candidate. Default: base and adapter, with the champion and the log.",
        ),
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option("--cases", help="JSONL file of cases: prompt or messages, reference, checks, group …"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of cases, sampled by hash.")
    ] = None,
    shards: Annotated[
        int, typer.Option("--shards", min=1, max=64, help="Number of processes that share the cases.")
    ] = 1,
    again: Annotated[
        bool, typer.Option("--again", help="Generate every answer again; ignore cached answers.")
    ] = False,
    savings: Annotated[
        bool,
        typer.Option(
            "--savings",
            help="Show the monthly cost of the logged model, the cost of hosting the small one, and "
            "the difference. The cost comes from the log, or from the prices in `graft plan "
            "catalog api_prices`.",
        ),
    ] = False,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Evaluate base and adapter on the held-out cases: rates with exact intervals, paired tests.

    Steps that are out of date run first: without an adapter of these settings, one is trained. Answers are
    cached: the same case on the same weights is generated once.

    Example:  graft eval --subject base --subject release:champion --subject log
    Example:  graft eval --savings --json | jq .saved_usd_per_month
    """
    if has_subcommand(context):
        return
    if savings:
        if subject or cases is not None or limit is not None or shards != 1 or again or engine is not None:
            raise typer.BadParameter("--savings can only be combined with --model, --project and --json")
        _show_savings(project, model, as_json=json)
        return
    with reporting(project, model, engine=engine) as found:
        evaluated = found.evaluate(
            subject or (),
            cases=cases.absolute() if cases is not None else None,
            limit=limit,
            shards=shards,
            again=again,
        )
    print_record(evaluated, as_json=json)


@app.command("import")
def import_results(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="inspect-ai logs (.eval, .json) or lm-eval results (results_*.json, samples_*.jsonl). "
            "The first is the baseline, the second the candidate.",
        ),
    ],
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Read results of inspect-ai or lm-eval: exact intervals, paired tests, and the cases side by side.

    Example:  graft eval import logs/base.eval logs/adapter.eval
    """
    from graftwork.evaluate.commands import import_evaluation

    with opened_with_progress(project, model) as work:
        imported = import_evaluation(work, [path.absolute() for path in files])
    print_record(imported, as_json=json)


class EvaluationLogFormat(StrEnum):
    inspect = "inspect"
    lm_eval = "lm-eval"


@app.command("export")
def export_results(
    form: Annotated[EvaluationLogFormat, typer.Option("--format", help="The tool that reads the result.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("exported"),
    subject: Annotated[
        list[str] | None, typer.Option("--subject", help="Only this subject. Repeatable. Default: all.")
    ] = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write the last evaluation as inspect-ai logs or lm-eval results, one per subject.

    Example:  graft eval export --format inspect --out logs && inspect view --log-dir logs
    """
    from graftwork.evaluate.commands import export_evaluation

    with opened_with_progress(project, model) as work:
        written = export_evaluation(work, form=form.value, out=out.absolute(), subjects=subject or ())
    paths = [path for files in written.values() for path in files]
    if json:
        print_json({"format": form.value, "files": paths, "subjects": list(written)})
        return
    for path in paths:
        print_line(stdout, quote(path), soft_wrap=True)


def _show_savings(project: Path | None, model: str | None, *, as_json: bool) -> None:

    with reporting(project, model) as found:
        saved = found.savings()
    if saved is None:
        raise NegativeResult(
            "the logs contain no calls for this model's roles",
            why="a model that is never called saves nothing",
            fix="specify other roles under `models:`, or add logs for these roles",
        )
    print_record(saved, as_json=as_json)


@app.command("escalation")
def escalation(
    large: Annotated[
        str, typer.Option("--large", help="The large model: log, or URL#MODEL of an endpoint.")
    ] = "log",
    small: Annotated[str, typer.Option("--small", help="The small model, as in --subject.")] = "adapter",
    check: Annotated[
        list[str] | None,
        typer.Option(
            "--check",
            help="A metric or check that must hold, otherwise the large model answers. Repeatable. "
            "Default: every metric that needs no reference.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of cases.")] = None,
    logprob: Annotated[
        bool,
        typer.Option(
            "--logprob",
            help="Also choose a threshold of the answer's log-probability, on the validation cases, for "
            "serve.escalate.min_logprob: auto.",
        ),
    ] = False,
    max_rate: Annotated[
        float,
        typer.Option(
            "--max-rate", min=0.001, max=1.0, help="Largest share of validation cases that may escalate."
        ),
    ] = 0.2,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            "--prefix-tokens",
            min=1,
            max=1024,
            help="Predict streams that are judged by their first tokens (serve.escalate.stream: prefix).",
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Compare live requests with the last forecast instead.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also write the curve as SVG.", metavar="FILE")
    ] = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Predict what happens if the small model answers first and the large one where a check fails.

    Shows the share of requests that escalate, the quality and the cost of the pair against each model
    alone, on the held-out cases, with intervals. The next `graft run` adds it to the report.
    As in `graft eval`, an adapter that is out of date is trained first.

    Example:  graft eval escalation --check json_valid --check citations_exist
    Example:  graft eval escalation --logprob --max-rate 0.1 --plot curve.svg
    Example:  graft eval escalation --live
    """
    if plot is not None and not logprob:
        raise typer.BadParameter("--plot needs --logprob")
    if live:
        _show_live(project, model, as_json=json)
        return
    with reporting(project, model) as found:
        predicted = found.predict_escalation(
            large=large,
            small=small,
            checks=check or (),
            limit=limit,
            max_rate=max_rate if logprob else None,
            prefix_tokens=prefix_tokens,
        )
    if plot is not None and predicted.curve is not None:
        from graftwork.files.disk import write_atomic
        from graftwork.views.endpoint import draw_curve

        write_atomic(plot, draw_curve(predicted))
    print_record(predicted, as_json=json)


def _show_live(project: Path | None, model: str | None, *, as_json: bool) -> None:
    """Exit code 1 if a figure differs from the forecast."""

    with reporting(project, model) as found:
        compared = found.live_escalation()
    print_record(compared, as_json=as_json)
    if not compared.agrees:
        raise typer.Exit(EXIT_NEGATIVE_RESULT)


@app.command("calibrate")
def calibrate(
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of labels per mode.")
    ] = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Compare the judge with people's labels: agreement and Cohen's kappa, with intervals over sessions.

    Labels are rewards and preference pairs of the logs, and feedback and corrections of captures. The gate
    uses a judge only after this, and only if the lower bound of its kappa is at least
    evaluate.judge.min_kappa. Exit code 1: the gate would not use it.

    Example:  graft eval calibrate --json | jq '.modes[].kappa'
    """
    with reporting(project, model) as found:
        judged = found.calibrate(limit=limit)
    print_record(judged, as_json=json)
    if not judged.sufficient:
        raise typer.Exit(EXIT_NEGATIVE_RESULT)
