"""A question of fit with what the project, this machine and a probe know of it, and its answer.

Input: what the user stated. Output: a FitAnswer. Reads the project's file and its dataset's manifest, asks
the driver which GPUs there are, and with `trace` starts the tracer in a child process. Loads no model.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graftwork.costmodel.plain_step import passing_setup, plain_peak
from graftwork.costmodel.rates import StepRates
from graftwork.files.dataset import MANIFEST, read_manifest
from graftwork.files.disk import write_atomic
from graftwork.model.base import EMBEDDED, find_base, models_folder
from graftwork.model.hub import parse_hub_name
from graftwork.model.probe import describe_device
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB, find_cpu, find_gpu, guess_cpu
from graftwork.plan.catalog.models import CatalogModel, find_model
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.candidates import require_possible
from graftwork.plan.fit.question import make_question, plain_setup
from graftwork.process.machine import ask_nvidia_smi, is_visible
from graftwork.process.worker import WORKER_ENVIRONMENT
from graftwork.records.base import GIB, Record, fingerprint
from graftwork.records.dataset import SplitSummary
from graftwork.records.errors import EnvironmentFailure, UserError, pip_install
from graftwork.records.hardware import Cpu, Machine
from graftwork.records.plan import (
    Algorithm,
    DeviceFacts,
    FitAnswer,
    FitOptions,
    FitQuestion,
    Method,
    ModelShape,
    Optimizer,
    PlainSetup,
)

if TYPE_CHECKING:
    from graftwork.project.folder import ProjectFolder

OnProgress = Callable[[str], None]
"""Receives a message before work that takes seconds."""
TRACED_WITH = ("torch", "transformers", "peft")
DEFAULT_SEQ = 2048
OWN_DATA = "data"


class FitRequest(Record):
    """The user's options; None if the project or this machine decides."""

    model: str | None = None
    method: Method | None = None
    algorithm: Algorithm = "sft"
    engine: Literal["graft", "hf"] = "graft"
    gpu: str | None = None
    gpus: int | None = None
    cpu: str | None = None
    ram: float | None = None
    link: float | None = None
    nvlink: bool = False
    seq: str | None = None
    rows: int | None = None
    epochs: float | None = None
    batch: int | None = None
    rank: int | None = None
    optimizer: Optimizer = "adamw_fused"
    offload: Literal["auto", "none", "optimizer", "weights"] = "auto"
    memory: float | None = None
    trace: bool | None = None
    """None: trace if the family has no step recipe and the libraries for it are installed."""
    claim: float | None = None
    prompt: int = 512
    completion: int = 512
    generations: int = 8
    reward_seconds: float = 0.0
    catalog: Path | None = None
    project: Path | None = None


def answer_fit(request: FitRequest, *, on_progress: OnProgress = lambda _: None) -> FitAnswer:
    """Answer the question; memory is traced if requested, or if the family has no step recipe."""
    project = _project(request)
    model = _model(request, project)
    question = ask(request, model=model, project=project)
    if request.claim is not None:
        require_possible(question, request.claim, eight=question.method != "full")
    rates = None
    if request.gpu is None and question.machine.gpu is not None:
        from graftwork.costmodel.probed_rates import rates_of_probe
        from graftwork.plan.probe import stored_probe

        # What a probe measured on this very machine. One that was cut short measured no products: then it is
        # as if there were none.
        facts = stored_probe(project, shape=question.shape)
        with suppress(ValueError):
            rates = rates_of_probe(facts) if facts is not None and facts.device.kind == "cuda" else None
    answer = fit(question, rates=rates)
    if request.trace:
        answer = correct(answer, model, rates=rates, on_progress=on_progress)
    elif request.trace is None and answer.certainty == "guessed" and can_trace():
        # Where the libraries cannot build this model, the guess with its wide range stays.
        with suppress(EnvironmentFailure, subprocess.TimeoutExpired):
            answer = correct(answer, model, rates=rates, on_progress=on_progress)
    reasons = (*answer.reasons, *doubts(model, answer), *question.machine.assumed)
    return answer.model_copy(update={"reasons": reasons})


def doubts(model: CatalogModel, answer: FitAnswer) -> Iterator[str]:
    """Say what was estimated as another family, because it has no step recipe."""
    if model.doubt:
        yield model.doubt
    elif answer.certainty == "guessed":
        yield (
            f"{model.architecture} has no step recipe: its memory is estimated as a Llama's, within 25 %; "
            f"`{pip_install('train')}` and `pip install peft` let graft trace it (--trace)"
        )


def question_of(request: FitRequest) -> FitQuestion:
    """Only the question, for callers that answer it for many machines."""
    project = _project(request)
    return ask(request, model=_model(request, project), project=project)


def ask(request: FitRequest, *, model: CatalogModel, project: "ProjectFolder | None") -> FitQuestion:
    """Build the question: from the options, then the project, then defaults."""
    train = project.settings.train if project is not None else None
    own_rows = _own_rows(project) if request.seq == OWN_DATA or (request.seq is None and project) else None
    if request.seq == OWN_DATA and own_rows is None:
        raise UserError(
            "there is no dataset whose lengths could be read",
            why="`--seq data` means the rows of this project",
            fix="run `graft data prepare` first, or give a number: --seq 2048",
            where="--seq",
        )
    if own_rows is None and request.seq is not None and not (request.seq.isdigit() and int(request.seq) >= 1):
        raise UserError(
            f"--seq is {request.seq!r}",
            why="it is the number of tokens per row",
            fix="give a number such as 2048, or `data` for the lengths of this project's dataset",
            where="--seq",
        )
    machine = named_machine(
        gpu=request.gpu, gpus=request.gpus, cpu=request.cpu, ram_gib=request.ram, overlay=request.catalog
    )
    gpu, link = machine.gpu, request.link
    if link is None and request.nvlink and gpu is not None:
        if gpu.nvlink_gb_s is None:
            raise UserError(
                f"{gpu.name} has no NVLink",
                why="this GPU is made without it",
                fix="leave --nvlink out, or state what you measured with --link GB/s",
                where="--nvlink",
            )
        link = gpu.nvlink_gb_s
    if gpu is not None and request.memory is not None and request.memory > gpu.memory_gib:
        # A limit says how much of a GPU may be taken; it makes no GPU larger.
        raise UserError(
            f"{gpu.name} has {gpu.memory_gib:.1f} GiB, not {request.memory:g}",
            why="--memory limits what may be used of a GPU",
            fix="leave --memory out, or specify a GPU that has this much",
            where="--memory",
        )
    stated = FitOptions(
        method=request.method or (train.method if train is not None else "qlora"),
        algorithm=request.algorithm,
        engine=request.engine,
        seq=int(request.seq or DEFAULT_SEQ) if own_rows is None else tuple(own_rows.spread_lengths()),
        trained_share=1.0
        if own_rows is None
        else max(own_rows.trained_tokens / max(own_rows.tokens, 1), 0.001),
        rows=request.rows,
        epochs=request.epochs or (train.epochs if train is not None else 1.0),
        batch_size=request.batch or (train.batch_size if train is not None else 16),
        rank=request.rank or (train.rank if train is not None else 16),
        adapted_layers=train.upper_layers if train is not None else None,
        experts=train.experts if train is not None else False,
        optimizer=request.optimizer,
        offload=request.offload,
        memory_limit_gib=request.memory,
        prompt_tokens=request.prompt,
        completion_tokens=request.completion,
        generations=request.generations,
        reward_seconds=request.reward_seconds,
    )
    return make_question(model, stated, machine=machine.model_copy(update={"link_gb_s": link}))


def _project(request: FitRequest) -> "ProjectFolder | None":
    """The project, if the question depends on one."""
    leans = request.model is None or request.seq == OWN_DATA or request.project is not None
    if not leans:
        return None
    # The settings of all stages come with it: only who leans on a project waits for them.
    from graftwork.project.folder import find_project, open_project

    if request.project is None and find_project() is None:
        if request.model is not None:
            return None
        raise UserError(
            "no model is named, and there is no project here whose base could be used",
            why="without its sizes nothing can be computed",
            fix="graft plan fit --model deepseek-coder-6.7b (`graft plan catalog models` lists the names)",
            where="--model",
        )
    return open_project(request.project)


def _model(request: FitRequest, project: "ProjectFolder | None") -> CatalogModel:
    if request.model is not None:
        return find_model(request.model, overlay=request.catalog)
    if project is None:
        raise UserError("no model is named", fix="give --model", where="--model")
    base = project.settings.base
    folder = project.root / base
    if base != EMBEDDED and (folder / "config.json").is_file():
        return find_model(str(folder), overlay=request.catalog)
    try:
        return find_model(base, overlay=request.catalog)
    except UserError:
        if base == EMBEDDED or parse_hub_name(base) is None:
            raise
    return find_model(find_base(base, project_folder=project.root).folder, overlay=request.catalog)


def _own_rows(project: "ProjectFolder | None") -> SplitSummary | None:
    """The training split of the dataset that was prepared last for the main model."""
    if project is None or not project.datasets.is_dir():
        return None
    manifests = sorted(project.datasets.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    for manifest in reversed(manifests):
        dataset = read_manifest(manifest.parent)
        rows = dataset.splits.get("train")
        if dataset.model == project.settings.main_model and rows is not None and rows.lengths:
            return rows
    return None


TRACER = "graftwork.costmodel.trace"
TRACE_TIMEOUT_SECONDS = 600.0
NOTHING_TO_TRACE = (
    "nothing was traced: graft's own step is counted tensor by tensor already; `graft plan probe` measures it"
)


def can_trace() -> bool:
    """Whether the tracer's libraries are installed."""
    return all(find_spec(name) is not None for name in TRACED_WITH)


def correct(
    answer: FitAnswer, model: CatalogModel, *, rates: StepRates | None, on_progress: OnProgress
) -> FitAnswer:
    """The answer with the traced peak in place of the computed one."""
    strategy, question = answer.strategy, answer.question
    if strategy.tuning is not None or question.machine.gpu is None:
        return answer.model_copy(update={"reasons": (*answer.reasons, NOTHING_TO_TRACE)})
    setup = plain_setup(
        question,
        sharding=strategy.sharding,
        rows=strategy.micro_rows,
        tokens=max(question.lengths),
        checkpointed=strategy.checkpointed_layers,
    )
    if question.method == "full" and strategy.sharding not in ("none", "ddp"):
        setup = passing_setup(setup)
    traced = cached_trace(config_of(model), setup, on_progress=on_progress)
    computed = plain_peak(question.shape, setup, architecture=question.architecture)
    surer = fit(question, rates=rates, correction=traced / computed.allocated, level="traced")
    off = 100 * (computed.allocated / traced - 1)
    reason = f"traced {traced / GIB:.2f} GiB allocated on one GPU alone; the estimate was {off:+.1f} % off"
    return surer.model_copy(update={"reasons": (reason, *surer.reasons)})


def cached_trace(config: dict[str, Any], setup: PlainSetup, *, on_progress: OnProgress) -> float:
    """The traced peak, from the user's cache if the same step was traced with the same libraries."""
    versions = {name: version(name) for name in TRACED_WITH if find_spec(name) is not None}
    key = fingerprint([config, setup.model_dump(mode="json"), versions])[:32]
    file = models_folder().parent / "traces" / f"{key}.json"
    with suppress(OSError, ValueError, KeyError):
        return float(json.loads(file.read_text())["allocated"])
    on_progress(f"tracing a step of {config.get('model_type')} without weights (up to a minute)")
    allocated = trace(config, setup)
    with suppress(OSError):
        write_atomic(file, json.dumps({"allocated": allocated, "versions": versions}))
    return allocated


def trace(config: dict[str, Any], setup: PlainSetup) -> float:
    """Bytes allocated at the peak, traced on the `meta` device in a child process."""
    request = json.dumps({"config": config, "setup": setup.model_dump(mode="json")})
    done = subprocess.run(
        [sys.executable, "-m", TRACER, request],
        capture_output=True,
        text=True,
        check=False,
        timeout=TRACE_TIMEOUT_SECONDS,
        env={**os.environ, **WORKER_ENVIRONMENT},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if done.returncode or "peak" not in result:
        complaint = result.get("what") or (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentFailure(
            "the step could not be traced",
            why=str(complaint),
            fix="use --no-trace: estimates need no libraries; or pip install peft and "
            + pip_install("train"),
            where="--trace",
        )
    return float(result["peak"]["allocated"])


def config_of(model: CatalogModel) -> dict[str, Any]:
    """The model's own config.json if available, else one of its sizes."""
    file = Path(model.source)
    if file.name.endswith(".json") and file.is_file():
        config: dict[str, Any] = json.loads(file.read_text())
        return config
    return shape_config(model.shape, architecture=model.architecture)


def shape_config(shape: ModelShape, *, architecture: str) -> dict[str, Any]:
    return {
        "model_type": architecture,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": shape.max_positions,
    }


QUERY = ("index", "uuid", "name", "memory.total")
"""Old drivers refuse a query with compute_cap altogether, so that comes from the catalog."""
PATIENCE_SECONDS = 10
ASSUMED_RAM = f"host memory is taken as {USUAL_RAM_GIB:g} GiB: state yours with --ram"


def named_machine(
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    cpu: str | None = None,
    ram_gib: float | None = None,
    overlay: Path | None = None,
) -> Machine:
    """The named machine. Without a GPU and a CPU it is this one; else host memory that is not stated is the
    usual amount for such machines, and `assumed` notes it.
    """
    if gpu is None and cpu is None:
        machine = this_machine(overlay=overlay)
    else:
        # A CPU alone was named: then it is about no GPU. A GPU says nothing of the CPU.
        machine = Machine(
            gpu=find_gpu(gpu, overlay=overlay) if gpu is not None else None,
            gpus=1 if gpu is not None else 0,
            cpu=find_cpu(cpu, overlay=overlay) if cpu is not None else None,
            ram_gib=USUAL_RAM_GIB,
            assumed=() if ram_gib is not None else (ASSUMED_RAM,),
        )
    if gpus is not None and machine.gpu is None:
        raise UserError(
            f"{gpus} GPUs of which kind?",
            why="this machine has none, and none is named",
            fix='name it: --gpu "RTX 5060 Ti 16GB"',
            where="--gpus",
        )
    stated = {"gpus": gpus, "ram_gib": ram_gib}
    return machine.model_copy(update={name: value for name, value in stated.items() if value is not None})


def this_machine(*, overlay: Path | None = None) -> Machine:
    """GPUs of one kind, that of the first one. Others would wait for the slowest anyway."""
    device = describe_device()
    gpus = read_gpus(ask_driver(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpu, count = None, 0
    if gpus:
        name, memory_gib = gpus[0]
        count = sum(gpu_name == name for gpu_name, _ in gpus)
        # The catalog's figures with the memory that the driver shows.
        gpu = find_gpu(name, overlay=overlay).model_copy(update={"memory_gib": memory_gib})
    return Machine(gpu=gpu, gpus=count, cpu=_cpu(device, overlay=overlay), ram_gib=device.memory_gib)


def this_host() -> Machine:
    """This machine without its GPUs."""
    device = describe_device()
    return Machine(cpu=_cpu(device, overlay=None), ram_gib=device.memory_gib)


def ask_driver() -> str:
    """Query nvidia-smi; nothing if there is none or it fails."""
    return ask_nvidia_smi(QUERY, seconds=PATIENCE_SECONDS) or ""


def read_gpus(printed: str, *, visible: str | None = None) -> list[tuple[str, float]]:
    """Name and GiB of each GPU, from lines of `index, uuid, name, MiB`.

    Other lines and hidden GPUs are skipped.
    """
    gpus = []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split(",", 2)]
        try:
            index, uuid, fields = int(cells[0]), cells[1], cells[2]
            name, mib = (cell.strip() for cell in fields.rsplit(",", 1))
            memory_gib = float(mib) / 1024
        except (IndexError, ValueError):
            continue
        if is_visible(index, uuid, visible):
            gpus.append((name, memory_gib))
    return gpus


def _cpu(device: DeviceFacts, *, overlay: Path | None) -> Cpu:
    """The catalog's, or a guess by the number of threads."""
    try:
        return find_cpu(device.name, overlay=overlay)
    except UserError:
        return guess_cpu(device.name, threads=device.threads)
