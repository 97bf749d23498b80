"""`graft plan fit`: does it fit, how is it best set, how long does it take?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from graftwork.records.fit import FitAnswer

LENGTHS_SHOWN = 64
RUN, MACHINE, RL = "The run", "The machine", "GRPO"


def fit(
    model: Annotated[
        str | None,
        typer.Option("--model", help="Name in the catalog, folder or config.json; else the project's base."),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="lora, qlora, dora or full.", rich_help_panel=RUN)
    ] = None,
    algorithm: Annotated[str, typer.Option("--algorithm", help="sft or grpo.", rich_help_panel=RUN)] = "sft",
    engine: Annotated[
        str, typer.Option("--engine", help="graft, or hf: transformers and PEFT.", rich_help_panel=RUN)
    ] = "graft",
    seq: Annotated[
        str | None,
        typer.Option("--seq", help="Tokens of a row, or `data`: as the project's are.", rich_help_panel=RUN),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows of an epoch.", rich_help_panel=RUN)
    ] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", min=0.001, rich_help_panel=RUN)] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Rows of an optimizer step.", rich_help_panel=RUN)
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="Rank of the adapters.", rich_help_panel=RUN)
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="adamw_fused, adamw_foreach, adamw_loop, adamw_8bit or sgd.",
            rich_help_panel=RUN,
        ),
    ] = "adamw_fused",
    offload: Annotated[
        str, typer.Option("--offload", help="auto, none, optimizer or weights.", rich_help_panel=RUN)
    ] = "auto",
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Card; else this machine's.", rich_help_panel=MACHINE)
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="How many.", rich_help_panel=MACHINE)] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", help="Processor.", rich_help_panel=MACHINE)] = None,
    ram: Annotated[
        float | None, typer.Option("--ram", help="Host memory, GiB.", rich_help_panel=MACHINE)
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            "--link", min=0.001, help="GB/s between cards, one way, as measured.", rich_help_panel=MACHINE
        ),
    ] = None,
    nvlink: Annotated[
        bool, typer.Option("--nvlink", help="The cards are bridged.", rich_help_panel=MACHINE)
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option("--memory", min=0.001, help="GiB of a card that may be taken.", rich_help_panel=MACHINE),
    ] = None,
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, help="Tokens of a prompt.", rich_help_panel=RL)
    ] = 512,
    completion: Annotated[
        int, typer.Option("--completion", min=1, help="Tokens of an answer.", rich_help_panel=RL)
    ] = 512,
    generations: Annotated[
        int, typer.Option("--generations", min=1, help="Answers to a prompt.", rich_help_panel=RL)
    ] = 8,
    trace: Annotated[
        bool | None,
        typer.Option(
            "--trace/--no-trace",
            help="Trace the step without weights; by default only for families without a step recipe.",
        ),
    ] = None,
    claim: Annotated[
        float | None, typer.Option("--claim", min=0.001, help="Tokens/s that somebody states: can that be?")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Folder for the settings of graft, DeepSpeed and accelerate."),
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Folder of your own catalog; else $GRAFT_CATALOG.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Say whether a run fits, how it is best set and how long it takes, each figure with its range.

    Exit code 1: it does not fit; then it says by how much, and what would make it fit.

    Example:  graft plan fit --model deepseek-coder-6.7b --method qlora --gpu "RTX 5060 Ti 16GB" --ram 128
    """
    from pydantic import ValidationError

    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.cli.show.plan import show_fit
    from graftwork.pipeline.fit import FitRequest, answer_fit
    from graftwork.records.errors import UserMistake

    stated = dict(locals())
    try:
        asked = FitRequest.model_validate({name: stated[name] for name in FitRequest.model_fields})
    except ValidationError as refused:
        first = refused.errors()[0]
        name = str(first["loc"][0])
        raise UserMistake(
            f"--{name} is {first['input']!r}",
            why=first["msg"],
            fix="`graft plan fit --help` lists what it takes",
            where=f"--{name}",
        ) from refused
    answer = answer_fit(asked, on_progress=lambda message: stderr.print(message, style="dim"))
    files = _write(answer, write) if write is not None else []
    if json:
        print_json(_as_json(answer))
    else:
        show_fit(stdout, answer, files=files)
    raise typer.Exit(0 if answer.fits else EXIT_ANSWER_IS_NO)


def _write(answer: "FitAnswer", folder: Path) -> list[Path]:
    from graftwork.files.disk import write_atomic
    from graftwork.plan.fit.settings_files import settings_files

    written = []
    for name, text in settings_files(answer).items():
        write_atomic(folder / name, text)
        written.append(folder / name)
    return written


def _as_json(answer: "FitAnswer") -> dict[str, Any]:
    """The whole answer; of many lengths, evenly spaced ones from the shortest to the longest."""
    body = answer.model_dump(mode="json")
    lengths = answer.question.lengths
    if len(lengths) > LENGTHS_SHOWN:
        last = len(lengths) - 1
        body["question"]["lengths"] = [
            lengths[at * last // (LENGTHS_SHOWN - 1)] for at in range(LENGTHS_SHOWN)
        ]
    return body


def serve(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of the catalog, a model's folder or its config.json.")
    ],
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="A card by name; this machine's by default.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="How many of them; one by default, here all.")
    ] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", help="Serve on this processor, without a card.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", min=0.1, help="Memory of the machine, GiB.")] = None,
    users: Annotated[int, typer.Option("--users", min=1, help="Who wait for an answer at once.")] = 1,
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens held for each user.")] = 2048,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens of an answer.")] = 500,
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt", min=1, help="Tokens read anew for an answer; all but the answer by default."
        ),
    ] = None,
    adapters: Annotated[int, typer.Option("--adapters", min=0, help="Adapters on one base.")] = 0,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Their rank.")] = 16,
    copies: Annotated[int, typer.Option("--copies", min=1, help="Whole models instead of adapters.")] = 1,
    weights: Annotated[
        str, typer.Option("--weights", help="fp32, fp16, bf16, int8, fp8, 4bit or auto.")
    ] = "auto",
    engine: Annotated[
        str | None, typer.Option("--engine", help="vllm, llama.cpp, or embedded (our own, float32).")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0.01, help="Seconds an answer may take.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", min=0.1, help="GiB that serving may take.")
    ] = None,
    catalog: Annotated[
        Path | None,
        typer.Option("--catalog", help="Folder with your own models.csv, gpus.csv, …; else $GRAFT_CATALOG."),
    ] = None,
    json: Json = False,
) -> None:
    """Say what serving takes: memory, latency, users, which quantisation is in time, how many specialists.

    Ends with 1 where it does not fit or the limit is not met.

    Example:  graft plan serve --model qwen2.5-coder-7b --cpu "EPYC 9454P" --ram 128 --context 800 --limit 12
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.fit_here import named_machine
    from graftwork.plan.catalog.hardware import list_gpus
    from graftwork.plan.catalog.models import find_model
    from graftwork.plan.serving.answer import make_question
    from graftwork.plan.serving.answer import serve as answer_question
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

    question = make_question(
        find_model(model, overlay=catalog),
        machine=named_machine(gpu=gpu, gpus=gpus, cpu=cpu, ram_gib=ram, overlay=catalog),
        engine=engine,
        weights=weights,
        adapters=adapters,
        rank=rank,
        copies=copies,
        users=users,
        context=context,
        answer=answer,
        prompt=prompt,
        limit_seconds=limit,
        memory_limit_gib=memory,
    )
    answered = answer_question(question, cards=list_gpus(overlay=catalog))
    if json:
        print_json(answered)
    else:
        from graftwork.cli.show.plan import show_serving

        show_serving(stdout, answered)
    if not answered.good:
        raise typer.Exit(EXIT_ANSWER_IS_NO)
