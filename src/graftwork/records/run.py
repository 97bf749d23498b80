"""A training run: the job that a worker gets, the steps and answers it logs, the outcome it leaves."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.fleet import Moment
from graftwork.records.plan import Drift, Plan, Residual

RunState = Literal["planned", "running", "stopped", "failed", "done"]

ENVIRONMENT = "environment"
"""The reward from the environment of an episode; a key of the evidence for rewards."""
TASKSET = "taskset"
"""The reward from a task set of verifiers."""


class TrainJob(Record):
    """All input of a training worker. It is the worker's only argument, as a file."""

    run_id: str
    folder: str
    base_folder: str
    dataset_folder: str
    plan: Plan
    run: dict[str, Any] = {}
    """How the run is monitored and stored: the `run` of the training settings, without secrets."""
    crew: dict[str, Any] = {}
    """Who shares the work: strategy, processes, offload."""
    keeping: dict[str, Any] = {}
    """Other settings outside the run's identity: checkpoint interval, compilation and packing."""
    endpoint: dict[str, Any] = {}
    """Access to the server that generates answers: its address, the variable of its key, limits."""
    project_folder: str = ""
    """Where custom reward functions are."""
    cases_file: str | None = None
    """The prompts of reinforcement learning; None: a split of the dataset."""
    eval_file: str | None = None
    """Held-out cases whose answers are rewarded during training; None: there are none."""
    start_adapter: str | None = None
    """A PEFT folder that training starts from."""
    deadline: float | None = None
    """When the place disappears, as seconds since 1970."""
    deadline_from: Moment | None = None
    """When the deadline was set: the worker counts from there, even if the clock changes."""


class TrainBatch(Record):
    """Several runs for one worker, in order: those on the same base share it once it is loaded."""

    folder: str
    begun: Moment
    """Earlier attempts at a run belonged to another command."""
    jobs: tuple[TrainJob, ...]
    side_by_side: tuple[tuple[int, ...], ...] = ()
    """Indexes in `jobs` of those that are trained in one batch of rows."""


class TrainStep(Record):
    """One optimizer step, as recorded in the journal. `weights` is a digest of the adapter."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    trained_tokens: int
    seconds: float
    weights: str = ""
    at: float = 0.0
    """When it was finished, as seconds since 1970."""
    steady: float = 0.0
    """The same by the machine's steady clock."""
    measures: dict[str, float] = {}
    """What the objective measured: margins and accuracy of pairs, rewards and KL of sampled answers."""
    skipped: bool = False
    """Loss or gradient was not a number, so no weight was changed."""
    repeated: tuple[int, ...] = ()
    """Skipped steps whose rows were trained on after this one."""


class GradedAnswer(Record):
    """An answer that was sampled during reinforcement learning, with its reward."""

    batch: int
    prompt: str
    """The id of the case that was asked."""
    text: str
    reward: float
    parts: dict[str, float | None] = {}
    audit: float | None = None
    decoy: bool = False


class AnswerExtremes(Record):
    """The best and the worst answers of the last batches; `batches` were sampled so far."""

    batches: int
    best: tuple[GradedAnswer, ...]
    worst: tuple[GradedAnswer, ...]


class TrainingEvaluation(Record):
    """The model looked at during training. `value` is the mean over `cases` cases.

    `compared` is False if time allowed fewer cases than in earlier evaluations; `better` says that none
    before it was as good.
    """

    step: int
    metric: str
    value: float
    cases: int
    seconds: float
    compared: bool = True
    better: bool = False


class TrainOutcome(Record):
    """The result of a finished run, besides the adapter folder."""

    run_id: str
    adapter_folder: str
    adapter_hash: str
    base_hash_before: str
    base_hash_after: str
    base_proof: Literal["memory", "files"] = "memory"
    """What was hashed: the weights in memory or, if those are trained themselves, the base's files."""
    steps: int
    epochs: float
    first_loss: float
    final_loss: float
    validation_loss_before: float | None
    validation_loss_after: float | None
    seconds: float
    load_seconds: float
    tokens_per_second: float
    peak_memory_gib: float
    """On a GPU, what was reserved there."""
    peak_allocated_gib: float | None = None
    """The peak that tensors used of it; None without a GPU."""
    trainable_parameters: int
    restarts: int
    replayed_steps: int
    replay_identical: bool | None
    skipped_steps: int = 0
    """Steps whose loss or gradient was not a number."""
    repeated_steps: int = 0
    """Skipped steps whose rows were trained on again."""
    rows: int = 0
    """Rows that were trained on; fewer than the split if the settings state a budget."""
    started_from: str | None = None
    """The hash of the adapter that training continued from."""
    looks: tuple[TrainingEvaluation, ...] = ()
    best_step: int | None = None
    """The step of the best evaluation."""
    measures_first: dict[str, float] = {}
    """What the objective measured at the first step; empty for supervised fine-tuning."""
    measures_last: dict[str, float] = {}
    """The same, as means over the last tenth of the steps."""
    residuals: tuple[Residual, ...] = ()
    residual_parts: tuple[Residual, ...] = ()
    """The same for what the figures are made of, as "minutes.load"."""
    drifts: tuple[Drift, ...] = ()
    """Figures that left their stated range, and why."""
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}

    @property
    def minutes(self) -> float:
        """What the user waited, over all attempts; the time of training itself where that is not stated."""
        waited = (residual.actual for residual in self.residuals if residual.name == "minutes")
        return next(waited, self.seconds / 60)
