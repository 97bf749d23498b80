"""`graft serve`: serve releases at an OpenAI-compatible endpoint, and manage its API keys."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder, has_subcommand, opened
from graftwork.cli.output import Json, print_json, stdout
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line

if TYPE_CHECKING:
    from graftwork.project.reporter import Reporter
    from graftwork.serve.keys import ApiKey
    from graftwork.serve.settings import ServeSettings

app = typer.Typer(invoke_without_command=True)

NO_RELEASE = (
    "no release yet: only the model `base` answers; `graft run` makes a release if the gate says deploy"
)

MOST_MODELS = 8

Challenger = Annotated[
    str | None,
    typer.Option(help="Alias of a release that gets a random share of the champion's sessions."),
]
Share = Annotated[
    float | None, typer.Option(help="Share of sessions for the challenger, between 0 and 1. Default: 0.1.")
]
Experiment = Annotated[
    str | None, typer.Option(help="Name of the experiment. Another name assigns every session again.")
]


Engine = Annotated[
    str | None,
    typer.Option(help="Engine: embedded, llamacpp, vllm, sglang or endpoint.", metavar="KIND"),
]


@app.callback()
def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 for any free port.")] = None,
    engine: Engine = None,
    challenger: Challenger = None,
    share: Share = None,
    experiment: Experiment = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Apply changed settings and aliases to the running endpoint without dropping requests.",
        ),
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Serve the champion, the base and every release at /v1/chat/completions, and capture the exchanges.

    With a challenger, a random share of the champion's sessions is answered by it; compare the two with
    `graft release ab champion challenger --watch`. User feedback is posted to /v1/feedback. --reload lists
    settings that need a restart; these keep their old value.

    Example:  graft serve --port 8080
    Example:  graft serve --challenger challenger --share 0.1
    Example:  graft serve --engine llamacpp
    """
    if has_subcommand(context):
        return
    if reload:
        if _given(
            host=host, port=port, engine=engine, challenger=challenger, share=share, experiment=experiment
        ):
            raise typer.BadParameter(
                "--reload applies what graft.yaml says: it can only be combined with --project and --json"
            )
        _reload(project, as_json=json)
        return
    from graftwork.api.endpoint import describe_start
    from graftwork.api.project import open_project
    from graftwork.serve.project import describe_experiment

    start = ExitStack()
    opened = open_project(project)
    opened = replace(opened, reporter=_choose_reporter(opened.settings.serve, start))
    experiment_options = _given(challenger=challenger, share=share, experiment=experiment)

    def apply_options(before: "ServeSettings") -> "ServeSettings":
        changes: dict[str, Any] = _given(host=host, port=port)
        if experiment_options:
            kept = before.split.model_dump() if before.split is not None else {}
            changes["split"] = {**kept, **experiment_options}
        revised = _revise(before, changes)
        return revised if engine is None else revise_engine(revised, engine)

    settings = apply_options(opened.settings.serve)

    def ready(url: str) -> None:
        start.close()
        with opened.open() as work:
            split, aliases = describe_experiment(work, settings), work.releases.aliases()
        models, curl, needs_key = describe_start(opened, settings, url)
        if json:
            body = {"url": url, "aliases": aliases, "models": models, "curl": curl}
            print_json(body if split is None else {**body, "split": split})
        else:
            stdout.print(f"serving at [bold]{url}/v1[/] (Ctrl-C to stop)", highlight=False)
            _show_start(models, curl, needs_key=needs_key, feedback_at=url if settings.capture else None)
            if not aliases and not settings.models:
                stdout.print(NO_RELEASE, highlight=False, markup=False, soft_wrap=True)
            if split is not None:
                stdout.print(split, highlight=False, markup=False, soft_wrap=True)
        stdout.file.flush()

    with start:
        opened.serve(settings, on_ready=ready, revise=apply_options)


def _show_start(models: tuple[str, ...], curl: str, *, needs_key: bool, feedback_at: str | None) -> None:
    """The models, a request to try, keys and feedback."""
    needed = "clients need one" if needs_key else "none is needed on this machine"
    lines = [
        f"models: {', '.join(models[:MOST_MODELS])}"
        + (f" and {len(models) - MOST_MODELS} more" if len(models) > MOST_MODELS else ""),
        f"try it: {curl}",
        f"API keys: {needed}; `graft serve keys create NAME` makes one",
    ]
    if feedback_at is not None:
        lines.append(
            f"feedback: POST {feedback_at}/v1/feedback "
            '{"capture": "<x-graft-capture>", "score": true}; the captures: `graft data captures`'
        )
    for line in lines:
        stdout.print(line, highlight=False, markup=False, soft_wrap=True)


def _choose_reporter(settings: "ServeSettings", start: ExitStack) -> "Reporter":
    """Progress and remarks on standard error: a bar until the endpoint answers, or JSON."""
    from graftwork.cli.progress import JsonRemarks, RichReporter

    if settings.log_format == "json":
        return JsonRemarks()
    return start.enter_context(RichReporter(tables=False))


def _reload(project: Path | None, *, as_json: bool) -> None:
    from graftwork.api.project import open_project

    result = open_project(project).reload_endpoint()
    if as_json:
        print_json({"changed": list(result.changed), "restart": list(result.restart)})
        return
    stdout.print(f"changed: {', '.join(result.changed) or 'nothing'}", highlight=False)
    if result.restart:
        stdout.print(f"changed after a restart: {', '.join(result.restart)}", highlight=False)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def revise_engine(settings: "ServeSettings", kind: str) -> "ServeSettings":
    """The settings with a different kind of engine, which keeps its own settings."""
    return _revise(settings, {"engine": {**settings.engine.model_dump(), "kind": kind}})


def _revise(settings: "ServeSettings", changes: dict[str, Any]) -> "ServeSettings":
    from graftwork.text.options import apply_options

    names = {"split": "challenger", "kind": "engine"}
    return apply_options(settings, changes, command="graft serve", options=names)


keys = typer.Typer(
    help="Create, list and revoke the API keys of the endpoint. Changes take effect without a restart.",
    no_args_is_help=True,
)


@keys.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name of the key, shown in lists, logs and metrics.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="models, feedback, traces, metrics or admin; repeatable. Default: models, feedback."
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Only this alias or release; repeatable. Default: all.")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="12h, 30d, 2026-12-31 or 2026-12-31T18:00 (UTC). Default: never.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Maximum requests per minute.")
    ] = None,
    requests_per_day: Annotated[int | None, typer.Option(min=1, help="Maximum requests per UTC day.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per minute, prompts and answers together.")
    ] = None,
    tokens_per_day: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per UTC day.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the secret to this private file instead of the terminal.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Create an API key and show its secret once. Only a hash of it is stored.

    Example:  graft serve keys create ci --model champion --expires 30d --requests-per-minute 60
    """
    from graftwork.files.disk import write_atomic
    from graftwork.serve.budgets import KeyBudget
    from graftwork.serve.keys import DEFAULT_SCOPES
    from graftwork.serve.project import create_key

    budget = KeyBudget(
        requests_per_minute=requests_per_minute,
        requests_per_day=requests_per_day,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
    )
    with opened(project) as work:
        key, secret = create_key(
            work, name, scopes=scope or DEFAULT_SCOPES, models=model or (), budget=budget, expires=expires
        )
    if out is not None:
        write_atomic(out, secret + "\n", private=True)
    if json:
        shown = _describe(key)
        print_json(shown if out is not None else {**shown, "secret": secret})
        return
    print_line(stdout, f"key {quote(name)} ({key.id}) may use: {', '.join(key.scopes)}")
    if out is not None:
        print_line(stdout, f"its secret is in {quote(out)}", soft_wrap=True)
    else:
        print_line(stdout, "its secret, which is not shown again:")
        print_line(stdout, f"  {secret}", soft_wrap=True)


@keys.command("list")
def list_keys(project: Folder = None, json: Json = False) -> None:
    """List the API keys with scopes, budgets and expiry, including revoked ones. Secrets are not stored.

    Example:  graft serve keys list --json
    """
    from graftwork.views.endpoint import view_keys

    with opened(project) as work:
        keys = work.api_keys.list()
    if json:
        print_json({"keys": [_describe(key) for key in keys]})
    else:
        print_document(stdout, view_keys(keys))


@keys.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of the key.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Revoke an API key. Running endpoints refuse it within a second.

    Example:  graft serve keys revoke ci
    """
    from graftwork.serve.project import revoke_key

    with opened(project) as work:
        key = revoke_key(work, name)
    if json:
        print_json(_describe(key))
    else:
        print_line(stdout, f"key {quote(key.name)} ({key.id}) is revoked")


def _describe(key: "ApiKey") -> dict[str, object]:
    return {**key.model_dump(mode="json", exclude={"digest"}), "state": key.state}


app.add_typer(keys, name="keys")
