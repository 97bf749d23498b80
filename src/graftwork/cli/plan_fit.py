"""`graft plan fit` and `graft plan serve`: does training or serving fit a machine, and how fast is it?"""

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
        typer.Option(
            "--model", help="A name in the catalog, a folder or a config.json. Default: the project's base."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="lora, qlora, dora or full.", rich_help_panel=RUN)
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="sft, dpo or grpo.", rich_help_panel=RUN)
    ] = "sft",
    engine: Annotated[
        str, typer.Option("--engine", help="graft, or hf for transformers and PEFT.", rich_help_panel=RUN)
    ] = "graft",
    seq: Annotated[
        str | None,
        typer.Option(
            "--seq",
            help="Tokens per row, or `data` for the lengths in the project's dataset.",
            rich_help_panel=RUN,
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows per epoch.", rich_help_panel=RUN)
    ] = None,
    epochs: Annotated[
        float | None, typer.Option("--epochs", min=0.001, help="Number of epochs.", rich_help_panel=RUN)
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Rows per optimizer step.", rich_help_panel=RUN)
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="Adapter rank.", rich_help_panel=RUN)
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
        str | None,
        typer.Option("--gpu", help="GPU. Default: the one in this machine.", rich_help_panel=MACHINE),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="Number of GPUs.", rich_help_panel=MACHINE)
    ] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", help="CPU.", rich_help_panel=MACHINE)] = None,
    ram: Annotated[
        float | None, typer.Option("--ram", help="Host memory in GiB.", rich_help_panel=MACHINE)
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(
            "--link",
            min=0.001,
            help="Measured one-way bandwidth between GPUs, GB/s.",
            rich_help_panel=MACHINE,
        ),
    ] = None,
    nvlink: Annotated[
        bool, typer.Option("--nvlink", help="The GPUs are connected by NVLink.", rich_help_panel=MACHINE)
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option("--memory", min=0.001, help="GPU memory limit in GiB.", rich_help_panel=MACHINE),
    ] = None,
    prompt: Annotated[
        int, typer.Option("--prompt", min=1, help="Tokens per prompt.", rich_help_panel=RL)
    ] = 512,
    completion: Annotated[
        int, typer.Option("--completion", min=1, help="Tokens per completion.", rich_help_panel=RL)
    ] = 512,
    generations: Annotated[
        int, typer.Option("--generations", min=1, help="Completions per prompt.", rich_help_panel=RL)
    ] = 8,
    reward_seconds: Annotated[
        float,
        typer.Option(
            "--reward-seconds",
            min=0,
            help="Seconds that the rewards of one completion take; `graft reward check` measures them.",
            rich_help_panel=RL,
        ),
    ] = 0.0,
    trace: Annotated[
        bool | None,
        typer.Option(
            "--trace/--no-trace",
            help="Trace the step without weights. Default: only for families without a step recipe.",
        ),
    ] = None,
    claim: Annotated[
        float | None,
        typer.Option(
            "--claim", min=0.001, help="A claimed throughput in tokens/s: check whether it is possible."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Write settings for graft, DeepSpeed and accelerate to this folder."),
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Folder with your own catalog. Default: $GRAFT_CATALOG.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Estimate whether a run fits, the best settings and the time, each figure with its range.

    Exit code 1: it does not fit. The output shows by how much, and which changes would make it fit.

    Example:  graft plan fit --model deepseek-coder-6.7b --method qlora --gpu "RTX 5060 Ti 16GB" --ram 128
    """
    options = dict(locals())
    from graftwork.api.plans import plan_fit
    from graftwork.cli.output import print_json, stderr, stdout

    asked = {name: value for name, value in options.items() if name not in ("write", "json")}
    answer = plan_fit(**asked, on_progress=lambda message: stderr.print(message, style="dim"))
    files = _write(answer, write) if write is not None else []
    if json:
        print_json(_as_json(answer))
    else:
        from graftwork.cli.show.plan import show_fit

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
    """The answer; of many row lengths, an evenly spaced sample."""
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
        str, typer.Option("--model", "-m", help="A name in the catalog, a model folder or a config.json.")
    ],
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU. Default: the one in this machine.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=1, help="Number of GPUs. Default: one, or all of this machine."),
    ] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", help="Serve on this CPU, without a GPU.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", min=0.1, help="Host memory in GiB.")] = None,
    users: Annotated[int, typer.Option("--users", min=1, help="Concurrent users.")] = 1,
    context: Annotated[int, typer.Option("--context", min=2, help="Context tokens per user.")] = 2048,
    answer: Annotated[int, typer.Option("--answer", min=1, help="Tokens per answer.")] = 500,
    prompt: Annotated[
        int | None,
        typer.Option(
            "--prompt",
            min=1,
            help="Prompt tokens to process per answer. Default: the context less the answer.",
        ),
    ] = None,
    adapters: Annotated[int, typer.Option("--adapters", min=0, help="Number of adapters on one base.")] = 0,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Adapter rank.")] = 16,
    adapter_layers: Annotated[
        int | None,
        typer.Option("--adapter-layers", min=1, help="Layers that carry an adapter. Default: all."),
    ] = None,
    copies: Annotated[
        int, typer.Option("--copies", min=1, help="Number of full model copies instead of adapters.")
    ] = 1,
    weights: Annotated[
        str, typer.Option("--weights", help="fp32, fp16, bf16, int8, fp8, 4bit or auto.")
    ] = "auto",
    engine: Annotated[
        str | None, typer.Option("--engine", help="vllm, llama.cpp, or embedded (built in, float32).")
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", min=0.01, help="Latency limit for an answer, in seconds.")
    ] = None,
    memory: Annotated[float | None, typer.Option("--memory", min=0.1, help="Memory limit in GiB.")] = None,
    catalog: Annotated[
        Path | None,
        typer.Option(
            "--catalog", help="Folder with your own models.csv, gpus.csv, … Default: $GRAFT_CATALOG."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate serving: memory, latency, users, quantizations that meet the limit, number of adapters.

    Exit code 1: it does not fit, or it does not meet the limit.

    Example:  graft plan serve --model qwen2.5-coder-7b --cpu "EPYC 9454P" --ram 128 --context 800 --limit 12
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.fit_here import named_machine
    from graftwork.plan.catalog.hardware import list_gpus
    from graftwork.plan.catalog.models import find_model
    from graftwork.plan.serving.answer import make_question
    from graftwork.plan.serving.answer import serve as answer_question
    from graftwork.plan.serving.question import ServeLoad
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

    load = ServeLoad(
        engine=engine,
        weights=weights,
        adapters=adapters,
        rank=rank,
        adapter_layers=adapter_layers,
        copies=copies,
        users=users,
        context=context,
        answer=answer,
        prompt=prompt,
        limit_seconds=limit,
        memory_limit_gib=memory,
    )
    machine = named_machine(gpu=gpu, gpus=gpus, cpu=cpu, ram_gib=ram, overlay=catalog)
    question = make_question(find_model(model, overlay=catalog), load, machine=machine)
    answered = answer_question(question, cards=list_gpus(overlay=catalog))
    if json:
        print_json(answered)
    else:
        from graftwork.cli.show.plan import show_serving

        show_serving(stdout, answered)
    if not answered.good:
        raise typer.Exit(EXIT_ANSWER_IS_NO)
