"""`graft plan serve`: what serving a model will be like, before anything is trained for it."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json


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
        from graftwork.cli.show.serving import show_serving

        show_serving(stdout, answered)
    if not answered.good:
        raise typer.Exit(EXIT_ANSWER_IS_NO)
