"""`graft data repair`: a teacher answers rows again that would be dropped."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder, print_record, reporting
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

ENGINE_PREFIX = "engine:"

if TYPE_CHECKING:
    from graftwork.data.settings import RepairSettings


def add_to(app: typer.Typer) -> None:
    app.command("repair")(repair)


def repair(
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            help="URL#MODEL[,key=VARIABLE][,concurrency=N], or engine:embedded#BASE or engine:llamacpp#BASE. "
            "Default: data.repair.teacher.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List rows, tokens and cost; send no requests.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL file. Default: repaired.jsonl next to the first log.")
    ] = None,
    augment: Annotated[
        list[str] | None,
        typer.Option("--augment", help="role=NAME: add rows for a small role. Repeatable."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Answers per prompt, which must agree.")
    ] = None,
    price_in: Annotated[
        float | None, typer.Option("--price-in", min=0, help="USD per million prompt tokens.")
    ] = None,
    price_out: Annotated[
        float | None, typer.Option("--price-out", min=0, help="USD per million answer tokens.")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option("--max-cost", help="Budget in USD, earlier runs included.")
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option("--max-total-tokens", help="Budget in tokens, earlier runs included.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=16, help="Maximum tokens per answer. Default: 1024.")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Maximum requests per minute.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Let a teacher answer the rows again that would be dropped as truncated, failed or placeholders.

    Accepted answers pass the project's checks and go to a log of their own, marked as the teacher's; they are
    never held out for tests. A killed run is resumed by the same command. Exit code 1: some rows are not
    decided yet.

    Example:  graft data repair --dry-run --price-in 0.5 --price-out 1.5
    """
    options = {
        "price_in": price_in,
        "price_out": price_out,
        "max_cost": max_cost,
        "max_total_tokens": max_total_tokens,
        "max_tokens": max_tokens,
        "requests_per_minute": rate,
    }
    with reporting(project) as found:
        settings = _revise(found.settings.data.repair, teacher, augment or [], samples, options)
        if dry_run:
            print_record(found.plan_repair(settings, out=out), as_json=json)
            return
        outcome = found.repair(settings, out=out)
    print_record(outcome, as_json=json)
    raise typer.Exit(EXIT_ANSWER_IS_NO if outcome.undecided else 0)


def _revise(
    settings: "RepairSettings",
    teacher: str | None,
    augment: list[str],
    samples: int | None,
    options: dict[str, Any],
) -> "RepairSettings":
    """The settings of graft.yaml with what the command line says."""
    from pydantic import ValidationError

    from graftwork.data.settings import RepairSettings
    from graftwork.evaluate.subjects import parse_subject
    from graftwork.records.errors import UserMistake
    from graftwork.text.validation import explain_error

    given = {name: value for name, value in options.items() if value is not None}
    values = settings.model_dump(mode="json")
    asked = values["teacher"]
    if teacher is not None and teacher.startswith(ENGINE_PREFIX) and "#" in teacher:
        engine, _, base = teacher.removeprefix(ENGINE_PREFIX).partition("#")
        asked = {**(asked or {}), "url": None, "key_variable": None, "engine": engine, "model": base}
    elif teacher is not None:
        endpoint = parse_subject(teacher).endpoint if "#" in teacher else None
        if endpoint is None:
            raise UserMistake(
                f"{teacher!r} is no teacher",
                why="a teacher is the address of an endpoint and a model, or an engine and a base",
                fix="write it as https://host/v1#model,key=NAME_OF_THE_VARIABLE or engine:llamacpp#BASE",
                where="--teacher",
            )
        named = endpoint.model_dump(mode="json", include={"url", "model", "key_variable", "concurrency"})
        asked = {**(asked or {}), **named, "engine": None}
    if given and asked is None:
        # A dry run with prices needs no teacher yet.
        asked = {"url": "http://not-named-yet", "model": "not-named-yet"}
    values["teacher"] = {**asked, **given} if asked is not None else None
    values["augment"] = [*values["augment"], *map(_role_of, augment)]
    values["samples"] = samples or values["samples"]
    try:
        return RepairSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UserMistake(
            "the options of the repair do not fit together",
            why=explain_error(first),
            fix="`graft data repair --help` lists the accepted values",
            where=".".join(str(part) for part in first["loc"]),
        ) from error


def _role_of(text: str) -> str:
    key, _, role = text.partition("=")
    if key != "role" or not role:
        raise typer.BadParameter("must be role=NAME", param_hint="--augment")
    return role
