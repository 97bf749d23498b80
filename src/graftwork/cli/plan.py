"""`graft plan` and its commands: what a run, an endpoint, a week or a purchase takes and costs, a check of
configurations, a probe of this machine, and the catalog.
"""

from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graftwork.cli.command import Folder, Model, has_subcommand, opened, print_record, reporting
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT, UserError
from graftwork.views.terminal import print_document

if TYPE_CHECKING:
    from graftwork.plan.cost import MeasuredRun
    from graftwork.project.folder import ProjectFolder
    from graftwork.records.plan import FitAnswer, FitQuestion, ProbeFacts, ProbeJob

LENGTHS_SHOWN = 64
RUN, MACHINE, RL = "The run", "The machine", "GRPO"


Catalog = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder with your own models.csv, gpus.csv, … Default: $GRAFT_CATALOG."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="A name in the catalog, a folder or a config.json. Default: the project's base."
    ),
]
Method = Annotated[
    Literal["qlora", "lora", "dora", "full"] | None,
    typer.Option(
        "--method", help="Default: the method of the project, otherwise qlora.", rich_help_panel=RUN
    ),
]
Seq = Annotated[
    str | None,
    typer.Option(
        "--seq",
        help="Tokens per row, or `data` for the lengths in the project's dataset.",
        rich_help_panel=RUN,
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows per epoch.", min=1, rich_help_panel=RUN)]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", help="Number of epochs.", min=0.001, rich_help_panel=RUN),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Rows per optimizer step.", min=1, rich_help_panel=RUN)
]
Rank = Annotated[int | None, typer.Option("--rank", help="Adapter rank.", min=1, rich_help_panel=RUN)]


def fit(
    model: ModelName = None,
    method: Annotated[
        str | None, typer.Option("--method", help="lora, qlora, dora or full.", rich_help_panel=RUN)
    ] = None,
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="sft, dpo or grpo.", rich_help_panel=RUN)
    ] = "sft",
    engine: Annotated[
        str, typer.Option("--engine", help="graft, or hf for transformers and PEFT.", rich_help_panel=RUN)
    ] = "graft",
    seq: Seq = None,
    rows: Rows = None,
    epochs: Epochs = None,
    batch: Batch = None,
    rank: Rank = None,
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
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Estimate whether a run fits, the best settings and the time, each figure with its range.

    Exit code 1: it does not fit. The output shows by how much, and which changes would make it fit.

    Example:  graft plan fit --model deepseek-coder-6.7b --method qlora --gpu "RTX 5060 Ti 16GB" --ram 128
    """
    options = dict(locals())
    from graftwork.api.plans import plan_fit

    asked = {name: value for name, value in options.items() if name not in ("write", "json")}
    answer = plan_fit(**asked, on_progress=lambda message: stderr.print(message, style="dim"))
    files = _write(answer, write) if write is not None else []
    if json:
        print_json(_as_json(answer))
    else:
        from graftwork.views.plan import view_fit

        print_document(stdout, view_fit(answer, files=files))
    raise typer.Exit(0 if answer.fits else EXIT_NEGATIVE_RESULT)


def _write(answer: "FitAnswer", folder: Path) -> list[Path]:
    from graftwork.files.disk import write_atomic
    from graftwork.plan.fit.answer import settings_files

    written = []
    for name, text in settings_files(answer).items():
        write_atomic(folder / name, text)
        written.append(folder / name)
    return written


def _as_json(answer: "FitAnswer") -> dict[str, Any]:
    """The answer; for many row lengths, computed on an evenly spaced sample."""
    body = answer.model_dump(mode="json")
    lengths = answer.question.lengths
    if len(lengths) > LENGTHS_SHOWN:
        last = len(lengths) - 1
        body["question"]["lengths"] = [
            lengths[index * last // (LENGTHS_SHOWN - 1)] for index in range(LENGTHS_SHOWN)
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
    catalog: Catalog = None,
    json: Json = False,
) -> None:
    """Estimate serving: memory, latency, users, quantizations that meet the limit, number of adapters.

    Exit code 1: it does not fit, or it does not meet the limit.

    Example:  graft plan serve --model qwen2.5-coder-7b --cpu "EPYC 9454P" --ram 128 --context 800 --limit 12
    """
    from graftwork.plan.catalog.hardware import list_gpus
    from graftwork.plan.catalog.models import find_model
    from graftwork.plan.fit.project import named_machine
    from graftwork.plan.serving import make_question
    from graftwork.plan.serving import serve as answer_question
    from graftwork.plan.serving_question import ServeLoad

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
    answered = answer_question(question, gpus=list_gpus(overlay=catalog))
    print_record(answered, as_json=json)
    if not answered.good:
        raise typer.Exit(EXIT_NEGATIVE_RESULT)


DEFAULT_GPU = "H100 SXM"

Engine = Annotated[
    Literal["graft", "hf"],
    typer.Option("--engine", help="graft, or hf for transformers and PEFT.", rich_help_panel=RUN),
]
Electricity = Annotated[float, typer.Option("--electricity", help="USD per kWh, for your own GPUs.", min=0)]
Waiting = Annotated[
    float, typer.Option("--waiting", help="What an hour of waiting costs you, in USD.", min=0)
]
Places = Annotated[list[str] | None, typer.Option("--place", help="Rent only from this place. Repeatable.")]
Today = Annotated[
    datetime | None,
    typer.Option("--today", formats=["%Y-%m-%d"], help="Date for the age of prices. Default: today."),
]


def compare(
    model: ModelName = None,
    method: Method = None,
    seq: Seq = None,
    rows: Rows = None,
    epochs: Epochs = None,
    batch: Batch = None,
    rank: Rank = None,
    engine: Engine = "graft",
    budget: Annotated[float | None, typer.Option("--budget", help="Budget in USD.", min=0)] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="Hours until the result is needed.", min=0)
    ] = None,
    goal: Annotated[
        Literal["cost", "time"], typer.Option("--goal", help="Sort by cost or by time.")
    ] = "cost",
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only offers with this GPU.")] = None,
    max_gpus: Annotated[
        int | None,
        typer.Option(
            "--max-gpus", help="Maximum GPUs per machine. Default: the smallest that fits, 8 for full.", min=1
        ),
    ] = None,
    place: Places = None,
    own: Annotated[
        list[str] | None, typer.Option("--own", help='GPUs that you own, such as "2x RTX 5060 Ti 16GB".')
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Measured hours of the run; requires --on.", min=0),
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="The GPU on which --hours was measured.")] = None,
    value: Annotated[
        float | None, typer.Option("--value", help="Value of a successful run in USD.", min=0)
    ] = None,
    success: Annotated[
        float, typer.Option("--success", help="Share of runs that succeed.", min=0, max=1)
    ] = 1.0,
    runs_per_month: Annotated[
        float, typer.Option("--runs-per-month", help="Runs per month that share a subscription.", min=0.01)
    ] = 4.0,
    preemptions: Annotated[
        float | None,
        typer.Option("--preemptions", help="Spot preemptions per hour.", min=0),
    ] = None,
    waiting: Waiting = 0.0,
    electricity: Electricity = 0.30,
    today: Today = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every offer instead of the best of each place.")
    ] = False,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare places for this run: hours, price, cost, interruptions, limits, and what changes the winner.

    Exit code 1: no place fits the budget and the deadline.
    Example:  graft plan compare --model olmo-7b --rows 5000 --epochs 3 --budget 500 --deadline 24
    """

    from graftwork.plan.cost import Terms
    from graftwork.plan.cost_comparison import OfferFilter, compare_places

    question = run_asked(
        model, method=method, seq=seq, rows=rows, epochs=epochs, batch=batch, rank=rank, engine=engine,
        catalog=catalog, project=project,
    )  # fmt: skip
    found = compare_places(
        question,
        OfferFilter(tuple(place or ()), gpu, max_gpus, [parse_gpus(text, "--own") for text in own or ()]),
        terms=Terms(
            today=today.date() if today else date.today(),
            goal=goal,
            budget_usd=budget,
            deadline_hours=deadline,
            value_usd=value,
            success_share=success,
            runs_per_month=runs_per_month,
            waiting_usd_per_hour=waiting,
            electricity_usd_kwh=electricity,
            preemptions_per_hour=preemptions,
        ),
        overlay=catalog,
        measured=_measured(hours, on),
    )
    if json:
        print_json(found)
    else:
        from graftwork.views.comparison import view_comparison

        print_document(stdout, view_comparison(found, everything=everything))
    raise typer.Exit(0 if found.best else EXIT_NEGATIVE_RESULT)


def run_asked(
    model: str | None, *, catalog: Path | None, project: Path | None, **stated: Any
) -> "FitQuestion":
    """The run as a question for `graft plan fit`; the GPU only completes it."""
    from graftwork.plan.fit.project import FitRequest, question_of

    return question_of(
        FitRequest(model=model, catalog=catalog, project=project, gpu=DEFAULT_GPU, gpus=1, **stated)
    )


def parse_gpus(text: str, option: str) -> tuple[str, int]:
    from graftwork.plan.purchase import read_purchase_option

    purchase = read_purchase_option(text, option=option)
    return purchase.name, purchase.gpus


def _measured(hours: float | None, on: str | None) -> "MeasuredRun | None":
    from graftwork.plan.cost import MeasuredRun

    if hours is None and on is None:
        return None
    if hours is None or on is None or hours <= 0:
        raise UserError(
            "--hours and --on must be given together",
            why="hours can be converted to other GPUs only if the GPU is known",
            fix='give both, such as --hours 2 --on "A100 40GB"',
            where="--hours",
        )
    name, count = parse_gpus(on, "--on")
    return MeasuredRun(gpu=name, gpus=count, hours=hours)


def buy(
    have: Annotated[str, typer.Option("--have", help='Your current hardware, such as "RTX 5060 Ti 16GB".')],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help='Hardware to consider and its price, such as "2x RTX 5060 Ti 16GB=700". '
            "Repeatable. Default price: the launch price of the GPUs.",
        ),
    ] = None,
    model: ModelName = None,
    method: Method = None,
    seq: Seq = None,
    rows: Rows = None,
    epochs: Epochs = None,
    batch: Batch = None,
    rank: Rank = None,
    engine: Engine = "graft",
    runs_per_week: Annotated[float, typer.Option("--runs-per-week", help="Runs per week.", min=0.01)] = 1.0,
    years: Annotated[float, typer.Option("--years", help="Years of use.", min=0.1)] = 2.0,
    electricity: Electricity = 0.30,
    residual: Annotated[
        float,
        typer.Option("--residual", help="Resale value as a share of the price.", min=0, max=1),
    ] = 0.5,
    host_watts: Annotated[
        float, typer.Option("--host-watts", help="Power of the machine without its GPUs, in watts.", min=0)
    ] = 120.0,
    ram: Annotated[
        float | None, typer.Option("--ram", help="Host memory in GiB. Default: 64.", min=1)
    ] = None,
    place: Places = None,
    waiting: Waiting = 0.0,
    today: Today = None,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare keeping, buying and renting hardware: capability, speed-up, cost per run, payback.

    Exit code 1: no option can do the run.

    Example:  graft plan buy --have "RTX 5060 Ti 16GB" --option "2x RTX 5060 Ti 16GB=700" --model olmo-7b
    """

    from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
    from graftwork.plan.cost import Terms
    from graftwork.plan.purchase import WEEKS_PER_MONTH, Use, read_purchase_option, weigh_purchase

    question = run_asked(
        model, method=method, seq=seq, rows=rows, epochs=epochs, batch=batch, rank=rank, engine=engine,
        catalog=catalog, project=project,
    )  # fmt: skip
    found = weigh_purchase(
        question,
        have=read_purchase_option(have, option="--have"),
        options=[read_purchase_option(text, option="--option") for text in option or ()],
        use=Use(
            runs_per_week=runs_per_week,
            years=years,
            electricity_usd_kwh=electricity,
            residual_share=residual,
            host_watts=host_watts,
            waiting_usd_per_hour=waiting,
            ram_gib=USUAL_RAM_GIB if ram is None else ram,
        ),
        terms=Terms(
            today=today.date() if today else date.today(),
            runs_per_month=runs_per_week * WEEKS_PER_MONTH,
            waiting_usd_per_hour=waiting,
            electricity_usd_kwh=electricity,
        ),
        overlay=catalog,
        providers=tuple(place or ()),
    )
    print_record(found, as_json=json)
    raise typer.Exit(0 if found.best else EXIT_NEGATIVE_RESULT)


def week(
    project: Folder = None,
    scenario: Annotated[
        Literal["auto", "sequential", "parallel", "iterative"] | None,
        typer.Option(
            "--scenario",
            help="Main model first, all at once, or specialists that move to the main model's adapter later. "
            "auto compares them. Default: that of --keep, otherwise the one in graft.yaml.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long to search for a better plan.")
    ] = 30.0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Threads of the solver.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip the search for what would change the plan most.")
    ] = False,
    start: Annotated[
        datetime | None,
        typer.Option(
            "--start", formats=["%Y-%m-%d"], help="A day of the week to plan. Default: the next week."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Plan with this place only. Repeatable.")
    ] = None,
    now: Annotated[
        datetime | None,
        typer.Option(
            "--now",
            formats=["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M%z", "%Y-%m-%dT%H:%M:%S%z"],
            help="Plan from this time on; without an offset, in the zone of the week.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="An earlier plan: sessions that have started are kept.")
    ] = None,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", help="What happened, as JSON, or @FILE with one event per line. Repeatable."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            help="Sessions planned manually (JSON): show their value and the rules that they break.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON, for --keep.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the plan as a page.")] = None,
    ical: Annotated[
        Path | None,
        typer.Option(
            "--ical", help="Write the sessions as a calendar, with alarms for those started by hand."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Plan a week of training over the quotas, windows, sessions and prices of all places.

    Exit code 1: no week keeps every rule; those that the nearest one breaks are named.

    Example:  graft plan week --scenario sequential --ical week.ics --json | jq .value,.gap
    """
    from graftwork.project.folder import open_project
    from graftwork.week.problem import Effort
    from graftwork.week.project import (
        WeekRequest,
        compare_proposal,
        plan_project_week,
        read_events,
        read_schedule,
        write_files,
    )

    found = open_project(project)
    earlier = read_schedule(keep) if keep else None
    usual = earlier.scenario if earlier is not None else found.settings.plan.week.scenario
    asked = WeekRequest(
        effort=Effort(
            seconds=seconds,
            workers=workers,
            scenario=scenario or usual,
            what_if=not quick,
        ),
        start=start.date() if start else None,
        only=tuple(only or ()),
        now=now,
        earlier=earlier,
        events=read_events(event or ()),
    )
    with stderr.status(f"planning the week: about {seconds * (1 if quick else 1.7):.0f} s"):
        schedule = plan_project_week(found, asked)
        proposal = compare_proposal(found, asked, schedule, compare) if compare else None
    write_files(schedule, out=out, html=html, ical=ical)
    if json:
        body = schedule.model_dump(mode="json")
        print_json({**body, "proposal": proposal.model_dump(mode="json")} if proposal else body)
        return
    from graftwork.views.plan import view_week
    from graftwork.views.week import view_proposal

    compared = view_proposal(proposal) if proposal is not None else None
    print_document(stdout, view_week(schedule, proposal=compared))


def lint(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A graft.yaml, or YAML or JSON for TrainingArguments, axolotl, LLaMA-Factory or DeepSpeed. "
            "Default: the graft.yaml of the project."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Rows per epoch.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU that the run is for, or `cpu`.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", min=0, help="Host memory in GiB.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The base model: a name in the catalog, or a config.json.")
    ] = None,
    data_model: Annotated[
        str | None, typer.Option("--data-model", help="The model that generated the rows.")
    ] = None,
    deployed_model: Annotated[
        str | None, typer.Option("--deployed-model", help="The model that is served.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens per row: a number, or a file of numbers.")
    ] = None,
    catalog: Catalog = None,
    json: Json = False,
) -> None:
    """Check a training configuration for settings that look right and are not.

    Exit code 1: at least one error was found.

    Example:  graft plan lint training.yaml --rows 238 --gpu "RTX 4090" --json
    """
    from graftwork.plan.lint.project import LintOptions, lint_file
    from graftwork.project.folder import find_project
    from graftwork.project.load import PROJECT_FILE

    path = file or (find_project() or Path()) / PROJECT_FILE
    done = lint_file(
        path,
        LintOptions(
            rows=rows,
            gpu=gpu,
            gpus=gpus,
            ram_gib=ram,
            model=model,
            data_model=data_model,
            deployed_model=deployed_model,
            lengths=lengths,
            catalog=catalog,
        ),
    )
    print_record(done, as_json=json)
    raise typer.Exit(EXIT_NEGATIVE_RESULT if done.errors else 0)


Shape = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A model in graft.yaml or the catalog, or a folder with config.json. Needed outside a project.",
    ),
]


def probe(
    project: Folder = None,
    model: Shape = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens per row in the measured steps.")] = 2048,
    rank: Annotated[int, typer.Option(min=1, help="Adapter rank in the measured steps.")] = 16,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit; measurements not started by then are skipped.")
    ] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    json: Json = False,
) -> None:
    """Measure the GPU or CPU of this machine at the sizes of a model, and use the result in later plans.

    Measures matrix products, memory, transfers, disk, and real training steps of two and four layers with
    random weights, in a separate process. `graft plan` and `graft plan fit` then report "probed" instead of
    "computed". Outside a project, --model is required.

    Example:  graft plan probe --model deepseek-coder-6.7b --json | jq .figures.tokens_per_second
    """
    from graftwork.plan.probe import keep_probe, shape_to_probe, takes_long_to_find
    from graftwork.records.plan import ProbeJob

    found = _open_if_any(project)
    if takes_long_to_find(found, model):
        stderr.print("preparing the base model: once per machine, about half a minute")
    shape = shape_to_probe(found, model)
    folder = found.root if found is not None else Path()
    job = ProbeJob(
        shape=shape,
        folder=str(folder.absolute()),
        length=length,
        rank=rank,
        seconds=seconds,
        threads=threads,
    )
    facts = _run_probe(job)
    files = keep_probe(facts, found)
    _show_probe(facts, files, as_json=json)


def _open_if_any(project: Path | None) -> "ProjectFolder | None":
    """The project, if there is one."""
    from graftwork.project.folder import find_project, open_project

    return open_project(project) if project is not None or find_project() is not None else None


def _run_probe(job: "ProbeJob") -> "ProbeFacts":
    from graftwork.plan.probe import run_probe

    with stderr.status("starting") as status:

        def show_part(part: str, left: float) -> None:
            status.update(f"probing: {part}; about {left:.0f} s left")

        return run_probe(job, on_part=show_part)


def _show_probe(facts: "ProbeFacts", files: tuple[Path, ...], *, as_json: bool) -> None:
    from graftwork.costmodel.probed_rates import probe_figures

    figures = probe_figures(facts)
    if as_json:
        print_json(
            {
                "certainty": "probed",
                "device": facts.device.model_dump(mode="json"),
                "figures": {name: figure.model_dump(mode="json") for name, figure in figures.items()},
                "left_out": list(facts.left_out),
                "facts": facts.model_dump(mode="json"),
                "kept": [str(file) for file in files],
            }
        )
        return
    from graftwork.views.plan import view_probe

    print_document(stdout, view_probe(facts, figures, files))


def _show_past(project: Path | None, runs: int, *, as_json: bool) -> None:
    from graftwork.plan.project import past_residuals

    with opened(project) as work:
        found = past_residuals(work, runs=runs)
    if as_json:
        from graftwork.records.base import Figure

        body = found.model_dump(mode="json")
        for run, kept in zip(body["runs"], found.runs, strict=True):
            for entry, residual in zip(run["residuals"], kept.residuals, strict=True):
                entry["actual"] = Figure.exact(residual.actual, residual.planned.unit).model_dump(mode="json")
                entry["off"] = Figure.exact(residual.off).model_dump(mode="json")
                entry["inside"] = residual.inside
        print_json(body)
        return
    from graftwork.views.plan import view_past

    print_document(stdout, view_past(found))


def catalog(
    kind: Annotated[
        str | None,
        typer.Argument(help="models, bases, gpus, cpus, prices, quoted, places or api_prices. Default: all."),
    ] = None,
    catalog: Catalog = None,
    json: Json = False,
) -> None:
    """List the models, bases, GPUs, CPUs, prices and places that plans use, with source, date and age.

    Rows in your own files of the same names replace the built-in rows or add to them. Old prices are marked.

    Example:  graft plan catalog prices --json | jq '.prices[] | select(.stale)'
    """

    from graftwork.api.plans import list_catalog

    listed = list_catalog(kind, overlay=catalog, today=date.today())
    if json:
        print_json(listed)
        return
    from graftwork.views.comparison import view_catalog

    print_document(stdout, view_catalog(listed))


app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def plan(
    context: typer.Context,
    past: Annotated[
        int | None,
        typer.Option(
            "--past",
            min=1,
            metavar="RUNS",
            help="Compare this many past runs, latest first, with their plans, and show the bias of each "
            "figure: the median of the relative errors.",
        ),
    ] = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Estimate memory, tokens, steps and time of the run before it starts, each with a range.

    Example:  graft plan --json | jq .minutes,.run.minutes
    Example:  graft plan --past 20 --json | jq '.biases[] | select(.figure == "minutes").off'
    """
    if has_subcommand(context):
        return
    if past is not None:
        if model is not None:
            raise typer.BadParameter("--past cannot be combined with --model: it is about all runs")
        _show_past(project, past, as_json=json)
        return
    from graftwork.views.terminal import show

    with reporting(project, model) as found:
        planned, whole = found.plan(), found.plan_run()
    if json:
        print_json({**planned.model_dump(mode="json"), "run": whole.model_dump(mode="json")})
        return
    show(stdout, planned)
    show(stdout, whole)


app.command("catalog")(catalog)
app.command("lint")(lint)
app.command("serve")(serve)
app.command("probe")(probe)
app.command("fit")(fit)
app.command("compare")(compare)
app.command("buy")(buy)
app.command("week")(week)
