"""The probe: half a minute on the real device in a separate process, with a cached result.

Input: a shape and a place to try the disk. Output: ProbeFacts, in the project's state folder and in the
user's cache, by device, driver and version of torch. A probe of another device is never given out.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.model.base import find_base, is_ready, models_folder
from graftwork.model.probe import name_device
from graftwork.model.shape import layer_parameters, read_shape
from graftwork.plan.catalog.models import find_model
from graftwork.process.worker import WORKER_ENVIRONMENT, compiled_cache
from graftwork.project.folder import ProjectFolder
from graftwork.records.base import fingerprint
from graftwork.records.errors import EnvironmentFailure, Interrupted, UserError, pip_install
from graftwork.records.plan import DeviceName, ModelShape, ProbeFacts, ProbeJob

FOLDER = "probes"
PATIENCE = 6.0
"""A probe that takes this many times its expected seconds is considered hung."""

Hear = Callable[[str, float], None]
"""The next part, and the expected remaining seconds."""


def shape_to_probe(project: ProjectFolder | None, model: str | None) -> ModelShape:
    """The shape of a model that the project, the catalog or a folder knows."""
    model_names = project.settings.all_models if project is not None else ()
    if project is not None and (model is None or model in model_names):
        base = project.settings.of_model(model or project.settings.main_model).base
        return read_shape(Path(find_base(base, project_folder=project.root).folder))
    if model is None:
        raise UserError(
            "there is no model to probe with",
            why="this folder holds no project, and none was named",
            fix="specify one: graft plan probe --model deepseek-coder-6.7b",
            where="--model",
        )
    return find_model(model).shape


def takes_long_to_find(project: ProjectFolder | None, model: str | None) -> bool:
    """Whether the embedded model has to be converted first."""
    if project is None or (model is not None and model not in project.settings.all_models):
        return False
    return not is_ready(project.settings.of_model(model or project.settings.main_model).base)


def run_probe(job: ProbeJob, *, on_part: Hear = lambda *_: None) -> ProbeFacts:
    """Probe this machine's device in a child."""
    command = [sys.executable, "-m", "graftwork.train.probe_process", job.model_dump_json()]
    environment = {**WORKER_ENVIRONMENT, **compiled_cache(), **os.environ}
    complaints: list[str] = []
    limit = job.seconds * PATIENCE
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            # What it has started ends with it: a process that is left holds the pipe open.
            start_new_session=True,
        )
        expired = threading.Event()

        def end_hanging() -> None:
            expired.set()
            _end_group(child)

        timer = threading.Timer(limit, end_hanging)
        timer.start()
        try:
            assert child.stderr is not None
            for line in child.stderr:
                try:
                    message = json.loads(line)
                    on_part(str(message["doing"]), float(message["left_seconds"]))
                except (ValueError, KeyError, TypeError):
                    complaints += [line.strip()] if line.strip() else []
            code = child.wait()
        except KeyboardInterrupt as stopped:
            raise Interrupted("the probe was stopped", fix="run graft plan probe again") from stopped
        finally:
            timer.cancel()
            if child.poll() is None:
                _end_group(child)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith("{")]
    if expired.is_set():
        raise EnvironmentFailure(
            "the probe hung and was stopped",
            why=f"it took longer than {limit:g} s"
            + (f"; its last message: {complaints[-1]}" if complaints else ""),
            fix="`graft doctor` says whether the device answers; then run graft plan probe again",
        )
    if code or not lines:
        raise EnvironmentFailure(
            "the probe gave no result",
            why=complaints[-1] if complaints else f"its process ended with {code}",
            fix=f"`graft doctor` says what this machine lacks; `{pip_install('train')}` installs torch",
        )
    return ProbeFacts.from_json(lines[-1])


def _end_group(child: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def keep_probe(facts: ProbeFacts, project: ProjectFolder | None) -> tuple[Path, ...]:
    """Store it for this project and for the user's others; returns where."""
    folders = [_cache()] if project is None else [project.state / FOLDER, _cache()]
    shape = fingerprint(facts.shape.model_dump(mode="json", exclude={"name", "max_positions"}))[:16]
    files = [folder / _key(facts.device) / f"{shape}.json" for folder in folders]
    for file in files:
        write_atomic(file, facts.to_json())
    return tuple(files)


def stored_probe(
    project: ProjectFolder | None = None, *, shape: ModelShape | None = None
) -> ProbeFacts | None:
    """The probe of this very device, driver and torch; the project's before the user's. Of several, the one
    with blocks nearest to `shape`, else the newest. Needs no torch and starts nothing heavy.
    """
    device = name_device()
    folders = [_cache()] if project is None else [project.state / FOLDER, _cache()]
    for folder in folders:
        probes = []
        for file in sorted((folder / _key(device)).glob("*.json")):
            with suppress(OSError, ValidationError):  # of another version
                facts = ProbeFacts.from_json(file.read_bytes())
                probes += [facts] if facts.device == device else []
        if probes and shape is not None:
            size = layer_parameters(shape)
            return min(probes, key=lambda facts: abs(math.log(layer_parameters(facts.shape) / size)))
        if probes:
            return max(probes, key=lambda facts: facts.at)
    return None


def _cache() -> Path:
    """Next to the converted models, which all projects of a user share as well."""
    return models_folder().parent / FOLDER


def _key(device: DeviceName) -> str:
    return fingerprint(device.model_dump(mode="json"))[:16]
