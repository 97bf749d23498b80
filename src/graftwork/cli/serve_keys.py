"""`graft serve keys`: create, list and revoke the API keys of the endpoint."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, opened
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.serve.budgets import KeyBudget
    from graftwork.serve.keys import ApiKey

app = typer.Typer(
    help="Create, list and revoke the API keys of the endpoint. Changes take effect without a restart.",
    no_args_is_help=True,
)


@app.command("create")
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
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.disk import write_atomic
    from graftwork.pipeline.keys import create_key
    from graftwork.serve.budgets import KeyBudget
    from graftwork.serve.keys import DEFAULT_SCOPES

    budget = KeyBudget(
        requests_per_minute=requests_per_minute,
        requests_per_day=requests_per_day,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
    )
    with opened(project) as work:
        made = create_key(
            work, name, scopes=scope or DEFAULT_SCOPES, models=model or (), budget=budget, expires=expires
        )
    if out is not None:
        write_atomic(out, made.secret + "\n", private=True)
    if json:
        shown = _describe(made.key)
        print_json(shown if out is not None else {**shown, "secret": made.secret})
        return
    print_line(stdout, f"key {quote(name)} ({made.key.id}) may use: {', '.join(made.key.scopes)}")
    if out is not None:
        print_line(stdout, f"its secret is in {quote(out)}", soft_wrap=True)
    else:
        print_line(stdout, "its secret, which is not shown again:")
        print_line(stdout, f"  {made.secret}", soft_wrap=True)


@app.command("list")
def list_keys(project: Folder = None, json: Json = False) -> None:
    """List the API keys with scopes, budgets and expiry, including revoked ones. Secrets are not stored.

    Example:  graft serve keys list --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import fit_words, print_line, quote, table

    with opened(project) as work:
        keys = work.api_keys.list()
    if json:
        print_json({"keys": [_describe(key) for key in keys]})
        return
    if not keys:
        print_line(stdout, "there are no keys; `graft serve keys create NAME` makes one")
        return
    made = table("name", "id", "state", "scopes", "models", "budget", "expires")
    for key in keys:
        made.add_row(
            quote(key.name),
            key.id,
            _state_of(key),
            " ".join(key.scopes),
            quote(" ".join(key.models) or "all"),
            _show_budget(key.budget),
            key.expires_at or "never",
        )
    stdout.print(fit_words(stdout, made))


@app.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="Name or id of the key.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Revoke an API key. Running endpoints refuse it within `serve.key_refresh_seconds`.

    Example:  graft serve keys revoke ci
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.pipeline.keys import revoke_key

    with opened(project) as work:
        key = revoke_key(work, name)
    if json:
        print_json(_describe(key))
    else:
        print_line(stdout, f"key {quote(key.name)} ({key.id}) is revoked")


def _describe(key: "ApiKey") -> dict[str, object]:
    return {**key.model_dump(mode="json", exclude={"digest"}), "state": _state_of(key)}


def _state_of(key: "ApiKey") -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is not None and datetime.fromisoformat(key.expires_at) <= datetime.now(UTC):
        return "expired"
    return "valid"


def _show_budget(budget: "KeyBudget") -> str:
    limits = {name: value for name, value in budget.model_dump().items() if value is not None}
    shown = [f"{value:,} {name.replace('_per_', '/')}" for name, value in limits.items()]
    return ", ".join(shown) or "none"
