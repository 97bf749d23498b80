"""`graft doctor --dry-run`: train the base for ten steps on made-up rows, in a folder that is removed again.

Runs the same steps as every run: data, plan and the training process.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graftwork.data.settings import DataSettings
from graftwork.files.disk import make_folder
from graftwork.model.base import EMBEDDED
from graftwork.pipeline.table import run_pipeline
from graftwork.project.doctor import DoctorCheck, decide
from graftwork.project.folder import ProjectFolder
from graftwork.project.open_project import use_project
from graftwork.project.reporter import Reporter
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import MIB
from graftwork.records.errors import Corrupted, GracefulStop, GraftError, Interrupted
from graftwork.records.run import TrainOutcome
from graftwork.train.checkpoints import verify_checkpoint
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.settings import EvalSettings, RunSettings

STEPS = 10
ROWS_AT_MOST = 2
"""Rows of a step on each device: the procedure is tested, not the memory of a full batch."""
WORDS_PER_ROW = 8
WORDS = ("river", "stone", "garden", "window", "letter", "market", "bridge", "winter", "copper", "signal")


class _ScratchProject(ProjectFolder):
    """A project in a temporary folder, whose state never goes into the team's database."""

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.state / 'state.db'}"


def check_dry_run(project: ProjectFolder, reporter: Reporter) -> Iterator[DoctorCheck]:
    make_folder(project.state)
    # Next to the project's own runs: the same disk is written to.
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=project.state) as folder:
        aside = _scratch_project(project, Path(folder))
        try:
            with use_project(aside, reporter) as work:
                outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
        except (GracefulStop, Interrupted):
            raise
        except GraftError as error:
            summary = f"{error.what}{f': {error.why}' if error.why else ''}"
            yield DoctorCheck(name="dry run", result="missing", found=summary, fix=error.fix)
            return
        yield decide(
            "dry run",
            outcome.steps == STEPS and math.isfinite(outcome.final_loss),
            f"{outcome.steps} steps in {outcome.seconds:.1f} s after {outcome.load_seconds:.1f} s of "
            f"loading, loss {outcome.first_loss:.3f} to {outcome.final_loss:.3f}, "
            f"peak {outcome.peak_memory_gib:.2f} GiB",
            "check the base and the precision: a loss that is not a number",
        )
        paths = sorted((Path(outcome.adapter_folder).parent / CHECKPOINTS).glob("step-*"))
        fix = "check the disk"
        try:
            manifest = verify_checkpoint(paths[-1]) if paths else None
            summary = "none was written"
        except Corrupted as damage:
            manifest, summary, fix = None, damage.what, f"{fix}: it does not keep what it is given"
        if manifest is not None:
            size = sum(manifest.sizes.values()) / MIB
            summary = f"step {manifest.step} written and read back, {size:.1f} MiB, every byte as it was"
        yield decide("checkpoint", manifest is not None, summary, fix)
        yield decide(
            "base unchanged",
            outcome.base_hash_before == outcome.base_hash_after,
            f"its weights hash to the same before and after ({outcome.base_hash_after[:12]})",
            "do not train on this machine: weights that must not change did",
        )


def _scratch_project(project: ProjectFolder, folder: Path) -> ProjectFolder:
    settings = project.settings.of_model(project.settings.main_model)
    base = settings.base
    if base != EMBEDDED and (project.root / base).expanduser().is_dir():
        base = str((project.root / base).expanduser().resolve())
    batch = min(settings.train.batch_size, ROWS_AT_MOST * settings.train.processes)
    train = settings.train.model_copy(
        update={
            "epochs": 1,
            "batch_size": batch,
            "max_rows": STEPS * batch,
            "validation_rows": 2,
            "checkpoint_every": STEPS // 2,
            "keep_checkpoints": 1,
            "start_from": None,
            "compile": "off",
            "eval": EvalSettings(),
            "run": RunSettings(max_restarts=0),
        }
    )
    # Questions and replies of common words, each unlike the others, the same every time.
    chance, rows = random.Random(10), []
    for number in range(2 * STEPS * batch):
        nouns = [f"{chance.choice(WORDS)}{chance.randrange(1000)}" for _ in range(WORDS_PER_ROW)]
        question = f"Sort these, list {number}: {' '.join(nouns)}"
        rows.append(json.dumps({"prompt": question, "completion": " ".join(sorted(nouns))}) + "\n")
    (folder / "rows.jsonl").write_text("".join(rows))
    data = DataSettings(
        logs=("rows.jsonl",),
        test=0.0,
        validation=0.1,
        max_tokens=settings.data.max_tokens,
        redact=False,
        near_duplicate=1.0,
        question_similarity=1.0,
    )
    return _ScratchProject(
        root=folder,
        settings=ProjectSettings(
            project="dry-run",
            base=base,
            data=data,
            train=train,
            plan=settings.plan,
        ),
    )
