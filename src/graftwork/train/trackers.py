"""Trackers: where the metrics of a run go besides its own folder, named in graft.yaml.

A tracker has PACKAGE (what must be installed) and `open_run(run_id, settings, folder)`, which returns an
object with `log(step, metrics)` and `close()`. None uses the network unless the user's environment names a
server. To add a built-in one, write such a class and name it in BUILT_IN and in BUILT_IN_TRACKERS of the
training settings. Another package adds one with an entry point in the group `graftwork.trackers` that names
such a module or object. A tracker that fails or hangs is dropped with a message and never stops the run. A
resumed run continues the same tracker run; repeated steps are not logged again.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from graftwork.files.disk import write_atomic
from graftwork.process.extensions import load_extension
from graftwork.process.pieces import CallThread
from graftwork.records.errors import EnvironmentFailure, pip_install
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.text.redact import redact_variables
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.run_folder import TRACKED
from graftwork.train.settings import BUILT_IN_TRACKERS

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine

PROJECT = "graftwork"
"""The project that runs are filed under, unless the user's environment names another."""


class TrackedRun(Protocol):
    """One run in one tracker."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class ClientRun:
    """The run of a library whose own run has `log` and `finish`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker(Protocol):
    PACKAGE: str
    """The package that must be importable."""

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path, /) -> TrackedRun:
        """Open the run of this id, or continue it if it exists. Files of the tracker go to `folder`."""


class TensorboardRun:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = any(folder.glob("events.out.tfevents.*"))
        self._writer: Any = SummaryWriter(str(folder))
        if not resumed:
            lines = [f"    {key}: {value}" for key, value in settings.items()]
            self._writer.add_text("settings", "\n".join(lines))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        # Kept in memory, the last two minutes would die with the process.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tensorboard:
    """Event files in the run's folder. `tensorboard --logdir .graft/runs` shows all runs."""

    PACKAGE = "tensorboard"

    def open_run(self, _run_id: str, settings: Mapping[str, Any], folder: Path) -> TensorboardRun:
        return TensorboardRun(folder, settings)


class WeightsAndBiases:
    """Offline in the run's folder, unless WANDB_MODE says otherwise.

    `wandb sync` sends an offline run later. WANDB_PROJECT names another project.
    """

    PACKAGE = "wandb"

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path) -> ClientRun:
        # No error reports to the library's makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            id=run_id,
            name=run_id,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            resume="allow",
            config=dict(settings),
            # The run's metrics, and nothing about the machine.
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, x_disable_meta=True, x_disable_stats=True
            ),
        )
        return ClientRun(run)


class Trackio:
    """A database in the run's folder, or where TRACKIO_DIR, a server or a Space is named."""

    PACKAGE = "trackio"

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path) -> ClientRun:
        # Read once, when the package is imported.
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
        import trackio

        run = trackio.init(
            os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=run_id,
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return ClientRun(run)


MLFLOW_TAG = "graftwork.run"
LONGEST_VALUE = 500
QUIET_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # The address of the run, with whatever login is in it.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Seven by default: a step would wait four minutes for a dead server.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


class MlflowRun:
    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Mlflow:
    """A store in the run's folder, or where MLFLOW_TRACKING_URI points.

    MLflow assigns its own run ids; ours is the run's name and a tag, by which a resumed run finds it.
    """

    PACKAGE = "mlflow"

    def open_run(self, run_id: str, settings: Mapping[str, Any], folder: Path) -> MlflowRun:
        for variable, value in QUIET_MLFLOW.items():
            os.environ.setdefault(variable, value)
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            folder.mkdir(parents=True, exist_ok=True)
            where = folder.absolute().as_uri()
            # A folder needs no database library; MLflow asks for this confirmation.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        existing = client.get_experiment_by_name(name)
        experiment = str(existing.experiment_id if existing else client.create_experiment(name))
        # By name too: a pushed release of this run has the same tag.
        query = f"tags.`{MLFLOW_TAG}` = '{run_id}' and attributes.run_name = '{run_id}'"
        runs = client.search_runs([experiment], filter_string=query, max_results=1)
        if runs:
            run = str(runs[0].info.run_id)
            client.update_run(run, status="RUNNING")
            return MlflowRun(client, run)
        run = str(client.create_run(experiment, run_name=run_id, tags={MLFLOW_TAG: run_id}).info.run_id)
        for setting, setting_value in _flatten(settings):
            client.log_param(run, setting, str(setting_value)[:LONGEST_VALUE])
        return MlflowRun(client, run)


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


BUILT_IN: dict[str, Tracker] = {
    "tensorboard": Tensorboard(),
    "wandb": WeightsAndBiases(),
    "mlflow": Mlflow(),
    "trackio": Trackio(),
}


def load_tracker(name: str) -> Tracker:
    """The built-in tracker of this name, or the one that an installed package adds."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    tracker: Tracker = load_extension("graftwork.trackers", name, attributes=("PACKAGE", "open_run"))
    return tracker


def require_installed(names: Sequence[str]) -> None:
    """Check before anything is loaded, not after an hour of training."""
    for name in names:
        package = load_tracker(name).PACKAGE
        if importlib.util.find_spec(package) is None:
            raise EnvironmentFailure(
                f"the tracker {name} is not installed",
                why="`train.run.trackers` names it",
                fix=f"{pip_install(name) if name in BUILT_IN_TRACKERS else f'pip install {package}'}, "
                "or remove it from the list",
            )


SECRETS = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    *("TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL", "HF_TOKEN"),
)
"""Values that a tracker's error message must not repeat: the message is kept with the run."""
PATIENCE_SECONDS = 60.0
"""For one call of a tracker: the timeouts of their libraries restart with every byte that arrives."""

T = TypeVar("T")


class TrackerCallback(TrainingCallback):
    name = "track"

    def __init__(
        self,
        trackers: Sequence[str],
        *,
        run_id: str,
        settings: Mapping[str, Any],
        folder: Path,
        latest_evaluation: Callable[[], TrainingEvaluation | None] = lambda: None,
        report: Callable[[str], None] = lambda _message: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._trackers = trackers
        self._patience = patience
        self._apart: dict[str, CallThread] = {}
        self._run_id = run_id
        self._settings = settings
        self._folder = folder
        self._latest_evaluation = latest_evaluation
        self._report = report
        self._open: dict[str, TrackedRun] = {}
        self._logged = 0

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        mark = self._folder / TRACKED
        self._logged = int(mark.read_text()) if mark.exists() else 0
        for name in self._trackers:
            # The run continues, whatever a library raises.
            try:
                open_run = partial(load_tracker(name).open_run, self._run_id, self._settings)
                self._apart[name] = CallThread(f"tracker {name}")
                self._open[name] = self._call(name, partial(open_run, self._folder / name))
            except Exception as error:
                self._give_up(name, error)

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        if not self._open or step.step <= self._logged:
            return
        self._logged = step.step
        # Marked first: a crash in between loses one point of a curve and never doubles one.
        write_atomic(self._folder / TRACKED, str(step.step), durable=False)
        metrics = tracked_metrics(step, self._latest_evaluation())
        for name, run in list(self._open.items()):
            try:
                self._call(name, partial(run.log, step.step, metrics))
            except Exception as error:
                del self._open[name]
                self._give_up(name, error)

    def on_train_end(self) -> None:
        for name, run in self._open.items():
            try:
                self._call(name, run.close)
            except Exception as error:
                self._give_up(name, error)
        self._open = {}

    def _call(self, name: str, work: Callable[[], T]) -> T:
        return self._apart[name].call(work, seconds=self._patience)

    def _give_up(self, name: str, error: Exception) -> None:
        first = next(iter(str(error).strip().splitlines()), "")
        message = redact_variables(first, environment=os.environ, variables=SECRETS)
        self._report(
            f"tracker {name} is disabled for the rest of the run: {type(error).__name__}"
            + (f": {message}" if message else "")
        )


def tracked_metrics(step: TrainStep, evaluation: TrainingEvaluation | None) -> dict[str, float]:
    """The metrics of a step, under the same names in every tracker."""
    metrics = {
        "train/loss": step.loss,
        "train/learning_rate": step.learning_rate,
        "train/gradient_norm": step.gradient_norm,
    }
    if step.seconds > 0:
        metrics["train/tokens_per_second"] = step.tokens / step.seconds
    if evaluation is not None and evaluation.step == step.step:
        metrics[f"look/{evaluation.metric}"] = evaluation.value
        metrics["look/cases"] = float(evaluation.cases)
    return metrics
