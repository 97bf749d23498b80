"""A question of fit with what the project, this machine and a probe know of it, and its answer.

In: what the user stated. Out: a FitAnswer. Reads the project's file and its dataset's manifest, asks the
driver which cards there are, and with `trace` starts the tracer in a child process. Loads no model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graftwork.files.dataset_folder import MANIFEST, read_manifest
from graftwork.model.base import EMBEDDED
from graftwork.pipeline.fit_here import named_machine
from graftwork.plan.catalog.models import CatalogModel, find_model, require_dense
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.ask import make_question
from graftwork.plan.fit.roofline import require_possible
from graftwork.plan.plain.decoder import FAMILIES
from graftwork.plan.timing.rates import Rates
from graftwork.records.base import Record
from graftwork.records.dataset import SplitSummary
from graftwork.records.errors import UserMistake
from graftwork.records.fit import Algorithm, FitAnswer, FitQuestion, Method, Optimizer
from graftwork.records.hardware import Machine

if TYPE_CHECKING:
    from graftwork.project.folder import ProjectFolder

DEFAULT_SEQ = 2048
OWN_DATA = "data"


class Asked(Record):
    """What the user stated; None where the project or this machine is to decide."""

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
    trace: bool = False
    claim: float | None = None
    prompt: int = 512
    completion: int = 512
    generations: int = 8
    catalog: Path | None = None
    project: Path | None = None


def answer_fit(asked: Asked) -> FitAnswer:
    """The answer, as sure as was asked for."""
    project = _project(asked)
    model = _model(asked, project)
    question = ask(asked, model=model, project=project)
    if asked.claim is not None:
        require_possible(question, asked.claim, eight=question.method != "full")
    rates = _probed(question, asked, project)
    answer = fit(question, rates=rates)
    if asked.trace:
        from graftwork.pipeline.fit_trace import correct

        answer = correct(answer, model, rates=rates)
    reasons = (*answer.reasons, *doubts(model, answer), *question.machine.assumed)
    return answer.model_copy(update={"reasons": reasons})


def doubts(model: CatalogModel, answer: FitAnswer) -> Iterator[str]:
    """What was taken for something else, because nobody has written it out."""
    if model.doubt:
        yield model.doubt
        return
    on_card = answer.question.machine.gpu is not None and answer.strategy.tuning is None
    if on_card and answer.certainty == "computed" and model.architecture not in FAMILIES:
        yield (
            f"the step of {model.architecture} is not written out: its memory is counted as a Llama's; "
            "--trace follows its own modules"
        )


def question_of(asked: Asked) -> FitQuestion:
    """The question alone, for those who answer it for many machines."""
    project = _project(asked)
    return ask(asked, model=_model(asked, project), project=project)


def ask(asked: Asked, *, model: CatalogModel, project: "ProjectFolder | None") -> FitQuestion:
    """The question: what was stated, then what the project says, then what is usual."""
    require_dense(model)
    train = project.settings.train if project is not None else None
    known = _own_rows(project) if asked.seq == OWN_DATA or (asked.seq is None and project) else None
    if asked.seq == OWN_DATA and known is None:
        raise UserMistake(
            "there is no dataset whose lengths could be read",
            why="`--seq data` means the rows of this project",
            fix="run `graft data prepare` first, or give a number: --seq 2048",
            where="--seq",
        )
    machine = _machine(asked)
    _require_room(asked, machine)
    return make_question(
        model,
        machine=machine,
        method=asked.method or (train.method if train is not None else "qlora"),
        algorithm=asked.algorithm,
        engine=asked.engine,
        seq=_number(asked.seq) if known is None else known.spread_lengths(),
        trained_share=1.0 if known is None else max(known.trained_tokens / max(known.tokens, 1), 0.001),
        rows=asked.rows,
        epochs=asked.epochs or (train.epochs if train is not None else 1.0),
        batch_rows=asked.batch or (train.batch_rows if train is not None else 16),
        rank=asked.rank or (train.rank if train is not None else 16),
        adapted_layers=train.upper_layers if train is not None else None,
        optimizer=asked.optimizer,
        offload=asked.offload,
        memory_limit_gib=asked.memory,
        prompt_tokens=asked.prompt,
        completion_tokens=asked.completion,
        generations=asked.generations,
    )


def _project(asked: Asked) -> "ProjectFolder | None":
    """The project, where the question leans on one."""
    leans = asked.model is None or asked.seq == OWN_DATA or asked.project is not None
    if not leans:
        return None
    # The settings of all stages come with it: only who leans on a project waits for them.
    from graftwork.project.folder import find_project, open_project

    if asked.project is None and find_project() is None:
        if asked.model is not None:
            return None
        raise UserMistake(
            "no model is named, and there is no project here whose base could be meant",
            why="without its sizes nothing can be reckoned",
            fix="graft plan fit --model deepseek-coder-6.7b (`graft plan catalog models` lists the names)",
            where="--model",
        )
    return open_project(asked.project)


def _model(asked: Asked, project: "ProjectFolder | None") -> CatalogModel:
    if asked.model is not None:
        return find_model(asked.model, overlay=asked.catalog)
    if project is None:
        raise UserMistake("no model is named", fix="give --model", where="--model")
    base = project.settings.base
    folder = project.root / base
    if base != EMBEDDED and (folder / "config.json").is_file():
        return find_model(str(folder), overlay=asked.catalog)
    return find_model(base, overlay=asked.catalog)


def _probed(question: FitQuestion, asked: Asked, project: "ProjectFolder | None") -> Rates | None:
    """What a probe measured on this very machine, where one is stored and the question is about its cards."""
    if asked.gpu is not None or question.machine.gpu is None:
        return None
    from graftwork.pipeline.probe import stored_probe
    from graftwork.plan.timing.probed import rates_of_probe

    facts = stored_probe(project, shape=question.shape)
    if facts is None or facts.device.kind != "cuda":
        return None
    try:
        return rates_of_probe(facts)
    except ValueError:
        # A probe that was cut short measured no products: then it is as if there were none.
        return None


def _machine(asked: Asked) -> Machine:
    machine = named_machine(
        gpu=asked.gpu, gpus=asked.gpus, cpu=asked.cpu, ram_gib=asked.ram, overlay=asked.catalog
    )
    gpu, link = machine.gpu, asked.link
    if link is None and asked.nvlink and gpu is not None:
        if gpu.nvlink_gb_s is None:
            raise UserMistake(
                f"{gpu.name} has no NVLink",
                why="its maker gives it no such connector",
                fix="leave --nvlink out, or state what you measured with --link GB/s",
                where="--nvlink",
            )
        link = gpu.nvlink_gb_s
    return machine.model_copy(update={"link_gb_s": link})


def _require_room(asked: Asked, machine: Machine) -> None:
    """A limit says how much of a card may be taken; it makes no card larger."""
    gpu = machine.gpu
    if gpu is not None and asked.memory is not None and asked.memory > gpu.memory_gib:
        raise UserMistake(
            f"{gpu.name} has {gpu.memory_gib:.1f} GiB, not {asked.memory:g}",
            why="--memory is what may be taken of a card",
            fix="leave --memory out, or name a card that has as much",
            where="--memory",
        )


def _number(seq: str | None) -> int:
    if seq is None:
        return DEFAULT_SEQ
    if not seq.isdigit() or int(seq) < 1:
        raise UserMistake(
            f"--seq is {seq!r}",
            why="it is the tokens of a row",
            fix="give a number such as 2048, or `data` for the lengths of this project's dataset",
            where="--seq",
        )
    return int(seq)


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
