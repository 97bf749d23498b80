"""The settings of training: the objective with its rollouts and rewards, the method, the schedule; and apart
from what changes the result, how a run is watched and kept.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from graftwork.grading.settings import RewardSettings, TasksetSettings
from graftwork.process.extensions import extension_names
from graftwork.records.base import NotSecret, Record, SecretAddress, SecretLink, SecretText
from graftwork.records.run import ENVIRONMENT, TASKSET
from graftwork.text.redact import EndpointUrl, VariableName

Objective = Literal["sft", "dpo", "orpo", "kto", "grpo"]
OBJECTIVE_SETTINGS = ("objective", "preferences", "policy", "rollouts", "rewards", "reward_checks", "mix")
USED_BY: dict[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": ("objective", "preferences"),
    "orpo": ("objective", "preferences"),
    "kto": ("objective", "preferences"),
    "grpo": ("objective", "policy", "rollouts", "rewards", "reward_checks", "mix"),
}
"""The settings above that affect what an objective learns."""
SPLITS_WITH_PROMPTS = ("rl", "train")
GENTLE_RATE = 1e-4
"""The default learning rate of every objective but supervised fine-tuning."""


class PreferenceSettings(Record):
    """Training on pairs of a chosen and a rejected reply, or on replies that are good or bad (KTO)."""

    beta: float = Field(
        0.1, gt=0, description="DPO, KTO: strength of the reference. ORPO: weight of the odds ratio."
    )
    sft: float = Field(0.0, ge=0, description="Weight of the supervised loss on chosen replies (DPO).")
    undesirable_weight: float = Field(
        1.0, gt=0, description="Weight of bad replies, relative to good ones (KTO)."
    )
    least_score: float | None = Field(
        None,
        description="Logged scores below this mark a reply as bad (KTO); the scores are audited first.",
    )


class PolicySettings(Record):
    """The loss over sampled answers."""

    loss: Literal["grpo", "cispo", "gspo"] = Field(
        "grpo", description="Loss for more than one update per batch; with one update they are the same."
    )
    normalize: Literal["dapo", "dr_grpo", "grpo"] = Field(
        "dapo",
        description="Divide by all tokens (dapo), by answers times max_completion_length (dr_grpo), or each "
        "answer by its own tokens (grpo).",
    )
    scale_rewards: Literal["none", "group"] = Field(
        "none", description="`group` divides advantages by the deviation of the group's rewards."
    )
    epsilon_low: float = Field(0.2, ge=0, lt=1, description="Clip range below 1.")
    epsilon_high: float | None = Field(
        None, ge=0, description="Clip range above 1 (default 0.2), or the largest ratio of cispo (default 5)."
    )
    kl: float = Field(
        0.0,
        ge=0,
        description="Weight of the KL divergence to the initial model, which is always measured unless "
        "`method` is full.",
    )

    @model_validator(mode="after")
    def _lets_ratios_of_one_pass(self) -> Self:
        if self.loss == "cispo" and self.upper_clip < 1:
            raise ValueError(
                "with `loss: cispo`, `epsilon_high` is the largest ratio: write 1 or more, such as 5"
            )
        return self

    @property
    def upper_clip(self) -> float:
        """`epsilon_high`, or its default for the loss."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss == "cispo" else 0.2


class EnvironmentSettings(Record):
    """The environment that answers the model between its replies, for episodes of several turns. It runs in
    the sandbox.
    """

    python: str | None = Field(
        None,
        description="A class of the project, `envs/file.py:Class`, with `step` or with methods as tools.",
    )
    command: Annotated[tuple[str, ...], NotSecret("it runs where no network can use a secret")] = Field(
        (), description="A program that answers JSON lines; `python` is the interpreter of the sandbox."
    )
    files: tuple[str, ...] = Field((), description="More files of the project that the environment reads.")
    turns: int = Field(4, ge=1, description="Maximum model replies per episode.")
    max_tokens: int = Field(256, ge=2, description="Maximum tokens per episode, without the prompt.")
    seconds: float = Field(5.0, gt=0, le=3600, description="Time limit of one turn of the environment.")
    role: Literal["user", "tool"] = Field("user", description="Role of the environment's messages.")

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.python is None) == (not self.command):
            raise ValueError("an environment is either `python: file.py:Class` or a `command`")
        if self.python is not None and not self.python.partition(":")[2].isidentifier():
            raise ValueError(f"{self.python} names no class: write envs/file.py:Class")
        return self


class RolloutEndpointSettings(Record):
    """A server that generates answers instead of the model in training, such as vLLM on another GPU.

    It loads the adapter before each batch: vLLM with runtime LoRA updating, which can read the run's folder.
    """

    url: EndpointUrl = Field(description="URL up to `/v1`.")
    model: str = Field(description="The model on the server: the base, or an adapter.")
    api_key_env: VariableName | None = Field(None, description="Environment variable with the API key.")
    concurrency: int = Field(16, ge=1, le=512, description="Concurrent requests.")


class RolloutSettings(Record):
    """Which prompts are answered in a step, and how."""

    source: str = Field(
        "rl",
        description="Prompts: a split of the dataset (`rl`, `train`), or a JSONL file of cases.",
    )
    steps: int = Field(20, ge=1, description="Batches of rollouts.")
    prompts: int = Field(8, ge=1, description="Prompts per batch.")
    num_generations: int = Field(8, ge=2, description="Answers per prompt.")
    max_completion_length: int = Field(48, ge=1, description="Maximum tokens per answer.")
    truncated: Literal["fail", "grade"] = Field(
        "fail",
        description="Whether an answer that reaches max_completion_length gets 0, or is graded as is.",
    )
    updates: int = Field(1, ge=1, description="Optimizer steps per batch of rollouts.")
    environment: EnvironmentSettings | None = Field(
        None, description="What responds between replies: an answer is then an episode of several turns."
    )
    taskset: TasksetSettings | None = Field(
        None, description="Prompts and rewards of a task set of verifiers, instead of `source`."
    )
    endpoint: RolloutEndpointSettings | None = Field(
        None, description="Sample from a server instead of the model in training."
    )

    @property
    def asks_rows(self) -> bool:
        """Whether the prompts are rows of the dataset."""
        return self.taskset is None and self.source in SPLITS_WITH_PROMPTS

    @property
    def longest_answer(self) -> int:
        """Tokens of an answer, with all turns of its episode."""
        return self.max_completion_length if self.environment is None else self.environment.max_tokens

    @model_validator(mode="after")
    def _endpoint_updates_once(self) -> Self:
        if self.endpoint is not None and self.updates > 1:
            raise ValueError("answers of an endpoint are trained on once: set `updates: 1`")
        return self

    @model_validator(mode="after")
    def _taskset_asks_alone(self) -> Self:
        if self.taskset is None:
            return self
        if self.environment is not None:
            raise ValueError("a task set is answered with one reply: remove `environment` or `taskset`")
        if self.source != type(self).model_fields["source"].default:
            raise ValueError("prompts come from `source` or from `taskset`: remove one of them")
        return self


class RewardCheckSettings(Record):
    """Guards against rewards that can be cheated."""

    seconds: float = Field(5.0, gt=0, description="Time limit per reward function and answer.")
    hacks: bool = Field(True, description="Run the catalog of hacks before training.")
    decoys: int = Field(
        4, ge=0, description="Unsolvable prompts added to the first batch: a reward for one is an alarm."
    )
    audit_share: float = Field(
        0.0, ge=0, lt=1, description="Share of each case's checks that never reward and only audit."
    )
    preflight: bool = Field(
        True, description="Stop before step 1 if almost no prompt or every prompt is solved."
    )


class MixSettings(Record):
    """Supervised rows next to rollouts, as shares of the gradient's weight."""

    sft: float = Field(
        0.0, ge=0, lt=1, description="Share of supervised rows; sampled answers have the rest."
    )
    decay: Literal["none", "linear", "to_zero"] = Field(
        "none",
        description="Schedule of the supervised share: constant, down to half, or down to zero at the last "
        "step.",
    )

    def shares(self, step: int, steps: int) -> tuple[float, float]:
        """The shares of sampled answers and supervised rows at step 1 … `steps`."""
        done = (step - 1) / max(steps - 1, 1)
        factor = {"none": 1.0, "linear": 1 - done / 2, "to_zero": 1 - done}[self.decay]
        sft = self.sft * factor
        return 1 - sft, sft


ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Method = Literal["lora", "qlora", "dora", "full"]
Strategy = Literal["single", "ddp", "fsdp", "zero2", "zero3"]


Switch = Annotated[
    Literal["auto", "on", "off"],
    # YAML reads a plain `on` as true.
    BeforeValidator(lambda given: {True: "on", False: "off"}[given] if isinstance(given, bool) else given),
]
BUILT_IN_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")

DISTRIBUTION = ("strategy", "processes", "offload")
KEEPING = (
    "checkpoint_every",
    "keep_checkpoints",
    "compile",
    "packing",
    "gradient_checkpointing",
    "deterministic",
)
ENDPOINT_ACCESS = ("url", "api_key_env", "concurrency")
"""Settings of `rollouts.endpoint` that do not change the result."""
LOSS = "loss"
"""The metric of an evaluation that needs no answers."""
REWARD = "reward"
"""The metric of an evaluation during training: the mean reward of answers to held-out cases."""


class ModuleSettings(Record):
    """Overrides for one kind of linear layer."""

    rank: int | None = Field(None, ge=1, le=512, description="Rank of the adapters of this layer.")
    alpha: float | None = Field(None, gt=0, description="Alpha of the adapters of this layer.")


class EvalSettings(Record):
    """Evaluation of the model during training, early stopping and the best checkpoint."""

    every: int | None = Field(
        None, ge=1, description="Steps between evaluations during training. Unset: none."
    )
    metric: str = Field(
        LOSS,
        description="`loss` on validation rows, a metric of generated answers, or `reward`: the rewards of "
        "grpo, on the cases of `source`.",
    )
    source: str | None = Field(None, description="JSONL file of held-out cases for `metric: reward`.")
    cases: int = Field(8, ge=1, description="Number of validation rows, or of these cases, to evaluate.")
    seconds: float = Field(60, gt=0, description="Time limit for the answers of one evaluation.")
    early_stopping: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without an improvement."
    )
    keep_best: bool = Field(
        True, description="Keep the adapter of the best evaluation instead of the last step."
    )

    @model_validator(mode="after")
    def _reward_needs_cases(self) -> Self:
        if (self.metric == REWARD) != (self.source is not None):
            raise ValueError("`metric: reward` and `source`, a file of held-out cases, belong together")
        return self

    @model_validator(mode="after")
    def _patience_needs_looks(self) -> Self:
        if self.early_stopping is not None and self.every is None:
            raise ValueError("early_stopping counts evaluations; set `every` as well")
        return self


class WatchSettings(Record):
    """When a run that diverges is stopped. A high loss is clipped, not skipped: its rows may be rare."""

    spike: float = Field(
        6.0,
        gt=1,
        description="A loss this many times the recent median is a spike. After spikes in a row, the run "
        "stops if rows with a low loss a few steps ago now have this many times that loss.",
    )
    gradient: float = Field(1e4, gt=0, description="A gradient norm above this counts as a spike.")
    window: int = Field(16, ge=4, description="Number of steps for the recent median.")
    tolerate: int = Field(
        1,
        ge=0,
        description="Consecutive spikes before the model is checked, and consecutive steps that may be "
        "skipped because loss or gradient is not a number.",
    )


class AlertSettings(Record):
    """Where alerts go when a run stalls or fails. They always go to the log."""

    command: SecretText | None = Field(
        None, description="A command that receives the alert as JSON on standard input."
    )
    webhook: SecretLink | None = Field(None, description="An http(s) URL that receives the alert as JSON.")


class RunSettings(Record):
    """Monitoring, checkpoint copies and restarts of a run. Nothing here changes the result."""

    mirror: SecretAddress | None = Field(
        None, description="Where to copy checkpoints: any fsspec URL (s3://, gs://, file://)."
    )
    deadline_minutes: float | None = Field(
        None, gt=0, description="When the machine is shut down: the last checkpoint is written in time."
    )
    nodes: int = Field(1, ge=1, description="Machines that train one run together, `processes` on each.")
    main_address: Annotated[str, NotSecret("a host and a port")] | None = Field(
        None, description="HOST:PORT of the first machine, as the others reach it."
    )
    max_restarts: int = Field(3, ge=0, description="Maximum restarts of a crashed worker.")
    alerts: AlertSettings = Field(
        default_factory=AlertSettings, description="Where alerts go when a run stalls or fails."
    )
    trackers: tuple[str, ...] = Field(
        (),
        description="Where to send the metrics of each step: tensorboard, wandb, mlflow, trackio, or one "
        "from an installed package.",
    )
    side_by_side: Switch = Field(
        "auto",
        description="Train runs of `--all` on one base in shared batches; `auto`: if measured to be faster.",
    )
    rehearse_crash: bool = Field(
        False, description="Kill the worker once with SIGKILL halfway, to show that nothing is lost."
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in BUILT_IN_TRACKERS]
        if unknown and (missing := sorted(set(unknown) - set(extension_names("graftwork.trackers")))):
            trackers = ", ".join((*BUILT_IN_TRACKERS, *extension_names("graftwork.trackers")))
            raise ValueError(f"unknown tracker {missing[0]!r}; known: {trackers}")
        return names


class TrainSettings(Record):
    """How the adapter is trained. Everything that changes the result is here; `run` is the rest."""

    method: Method = Field(
        "lora",
        description="`qlora` quantizes the base to 4 bits, `dora` adds magnitudes, `full` trains everything.",
    )
    rank: int = Field(8, ge=1, le=512, description="Rank of the adapters.")
    alpha: float = Field(16, gt=0, description="Scale adapter outputs by alpha / rank.")
    use_rslora: bool = Field(False, description="Scale by alpha / √rank instead (rsLoRA).")
    target_modules: tuple[str, ...] | Literal["all"] = Field(
        "all", description="Linear layers with an adapter, by name; all of the decoder's by default."
    )
    modules: dict[str, ModuleSettings] = Field({}, description="Rank or alpha per layer name.")
    experts: bool = Field(
        False, description="Adapt the experts of a mixture-of-experts model too, not only its attention."
    )
    upper_layers: int | None = Field(None, ge=1, description="Adapt only this many layers from the top.")
    start_from: str | None = Field(
        None, description="Continue from this adapter: `main` for the main model's, or a PEFT folder."
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="bfloat16 if the device supports it, else float16 with loss scaling, else float32.",
    )
    fp8: Switch = Field(
        "auto",
        description="Frozen weights and matrix products in 8 bits; auto: for models over 1e9 parameters.",
    )
    compile: Switch = Field("auto", description="Compile the layers with torch.compile if that is faster.")
    packing: Switch = Field("auto", description="Pack rows into sequences; attention does not cross rows.")
    gradient_checkpointing: Switch = Field(
        "auto",
        description="Gradient checkpointing on the plain step; auto: as planned.",
    )
    deterministic: Switch = Field(
        "auto",
        description="Sum in the same order every time on a GPU, so that a killed run resumes to the same "
        "bytes; auto: if layers are streamed. On a CPU this is always the case.",
    )
    epochs: int = Field(2, ge=1, description="Number of epochs.")
    batch_size: int = Field(8, ge=1, description="Rows per optimizer step.")
    learning_rate: float = Field(
        5e-4, gt=0, le=1, description="Peak learning rate, with cosine decay. Default without sft: 1e-4."
    )
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="Share of the steps used for warmup.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of the trained weights.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip gradients to this norm.")
    proximal: float = Field(
        0.0,
        ge=0,
        description="Pull the adapter towards the starting point: this, times half the squared distance, is "
        "added to the loss (FedProx). 0: no pull.",
    )
    max_rows: int | None = Field(None, ge=1, description="Train on at most this many rows.")
    validation_rows: int = Field(
        24, ge=0, description="Number of rows for the validation loss before and after training."
    )
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Checkpoints to keep, in addition to the best.")
    eval: EvalSettings = Field(
        default_factory=EvalSettings,
        description="Evaluations during training: early stopping, best checkpoint.",
    )
    watch: WatchSettings = Field(
        default_factory=WatchSettings, description="When to stop a run that diverges."
    )
    strategy: Strategy = Field("single", description="Distributed strategy.")
    processes: int = Field(1, ge=1, description="Number of processes (devices) per machine.")
    offload: bool = Field(
        False,
        description="Offload optimizer and weights to host memory (fsdp, zero2, zero3). With `method: full` "
        "on one device, stream the layers from there.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads. Default: all.")
    seed: int = Field(17, ge=0, description="Seed of the row order and the initial weights.")
    objective: Objective = Field(
        "sft",
        description="`sft` trains on replies, `dpo` and `orpo` on pairs with rejected replies, `kto` on good "
        "and bad replies, `grpo` on sampled answers and their rewards.",
    )
    preferences: PreferenceSettings = Field(
        default_factory=PreferenceSettings,
        description="The loss over pairs (dpo, orpo) or judged replies (kto).",
    )
    policy: PolicySettings = Field(
        default_factory=PolicySettings, description="The loss over sampled answers (grpo)."
    )
    rollouts: RolloutSettings = Field(
        default_factory=RolloutSettings, description="Which prompts to answer, and how (grpo)."
    )
    rewards: tuple[RewardSettings, ...] = Field((), description="What to reward an answer for (grpo).")
    reward_checks: RewardCheckSettings = Field(
        default_factory=RewardCheckSettings, description="Guards against rewards that can be cheated (grpo)."
    )
    mix: MixSettings = Field(
        default_factory=MixSettings, description="Shares of sampled answers and supervised rows (grpo)."
    )
    run: RunSettings = Field(
        default_factory=RunSettings, description="Monitoring, checkpoint copies and restarts."
    )

    @model_validator(mode="before")
    @classmethod
    def _rate_of_the_objective(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("objective", "sft") != "sft":
            return {"learning_rate": GENTLE_RATE, **given}
        return given

    @model_validator(mode="after")
    def _objective_is_possible(self) -> Self:
        if self.objective != "sft" and self.strategy != "single":
            raise ValueError(f"the objective {self.objective} trains in one process: set `strategy: single`")
        if self.objective != "sft" and self.method == "full" and self.offload:
            raise ValueError(f"the objective {self.objective} does not stream layers: set `offload: false`")
        if self.objective == "grpo" and not self.rewards:
            raise ValueError("grpo needs `rewards`: a list of metrics that say how good an answer is")
        if self.rollouts.environment is None and any(part.metric == ENVIRONMENT for part in self.rewards):
            raise ValueError("the reward `environment` needs `rollouts.environment`")
        if self.rollouts.taskset is None and any(part.metric == TASKSET for part in self.rewards):
            raise ValueError("the reward `taskset` needs `rollouts.taskset`")
        if self.objective == "grpo" and self.method == "full" and self.policy.kl:
            raise ValueError(
                "policy.kl needs a second copy of the model where all weights are trained: set "
                "`policy.kl: 0`, or another method"
            )
        if self.objective == "grpo" and self.method == "full" and self.rollouts.endpoint is not None:
            raise ValueError(
                "rollouts.endpoint gets adapters and no whole models, so its answers would stay those of the "
                "start: set `method: lora`, or leave `endpoint` out"
            )
        if self.objective == "kto" and self.batch_size < 2:
            raise ValueError("kto compares each prompt with the reply of another row: set `batch_size: 2`")
        return self

    @model_validator(mode="after")
    def _reward_is_examinable(self) -> Self:
        if self.eval.metric != REWARD:
            return self
        if self.objective != "grpo":
            raise ValueError("`eval.metric: reward` needs `objective: grpo`, whose rewards it measures")
        if self.rollouts.environment is not None or self.rollouts.taskset is not None:
            raise ValueError(
                "`eval.metric: reward` needs single replies to cases of a file: remove "
                f"`rollouts.environment` or `rollouts.taskset`, or set `eval.metric: {LOSS}`"
            )
        return self

    @model_validator(mode="after")
    def _validate_unsharded_rollouts(self) -> Self:
        if not self.eval.every or self.eval.metric == LOSS:
            return self
        if self.strategy in ("fsdp", "zero3"):
            raise ValueError(
                f"`eval.metric: {self.eval.metric}` needs the whole model on one device, and the strategy "
                f"{self.strategy} shards it; set `eval.metric: {LOSS}`"
            )
        if self.method == "full" and self.offload and self.strategy == "single":
            raise ValueError(
                f"`eval.metric: {self.eval.metric}` needs the whole model on one device, and `offload` "
                f"leaves it in host memory; set `eval.metric: {LOSS}`"
            )
        return self

    @model_validator(mode="after")
    def _experts_have_plain_adapters(self) -> Self:
        if self.experts and self.method not in ("lora", "qlora"):
            raise ValueError(f"experts are adapted by lora and qlora, not by {self.method}")
        return self

    @model_validator(mode="after")
    def _proximal_is_possible(self) -> Self:
        if self.proximal and (self.objective != "sft" or self.strategy != "single" or self.method == "full"):
            raise ValueError(
                "proximal needs `objective: sft`, `strategy: single` and an adapter (lora, qlora or dora)"
            )
        return self

    @property
    def needs_rows(self) -> bool:
        """Whether rows of the dataset are trained on or asked."""
        return self.objective != "grpo" or self.mix.sft > 0 or self.rollouts.asks_rows

    def what_is_learned(self) -> dict[str, Any]:
        """Everything that changes the result: two runs that agree here are the same run."""
        # An objective's settings count only where it is chosen: supervised runs keep their names.
        unused = set(OBJECTIVE_SETTINGS) - set(USED_BY[self.objective])
        learned = self.model_dump(mode="json", exclude={"run", *DISTRIBUTION, *KEEPING, *unused})
        # Which server answers, and how it is reached, changes nothing: a run resumes with any address.
        for name in ENDPOINT_ACCESS:
            (learned.get("rollouts", {}).get("endpoint") or {}).pop(name, None)
        return learned

    def endpoint_access(self) -> dict[str, Any]:
        """Access to the server of rollouts; empty without one."""
        endpoint = self.rollouts.endpoint if self.objective == "grpo" else None
        return {} if endpoint is None else endpoint.model_dump(mode="json", include=set(ENDPOINT_ACCESS))

    def keeping(self) -> dict[str, Any]:
        """Settings of checkpoints and speed: they change at most the last bits. If `packing` selects other
        weights, the plan identifies the run by those.
        """
        return self.model_dump(mode="json", include=set(KEEPING))

    def distribution(self) -> dict[str, Any]:
        """How processes share the work. It changes no loss, so a run may resume with any strategy."""
        return self.model_dump(mode="json", include=set(DISTRIBUTION))


def given_settings(train: TrainSettings) -> set[str]:
    """Return those of the settings specific to some objectives that differ from their defaults."""
    defaults = type(train)()
    names = (name for name in OBJECTIVE_SETTINGS if name != "objective")
    return {name for name in names if getattr(train, name) != getattr(defaults, name)}


def why_unused(name: str) -> str:
    """Explain why a setting has no effect: the objectives that it belongs to."""
    owners = [objective for objective, used in USED_BY.items() if name in used]
    return f"only `objective: {'` and `'.join(owners)}` uses it: remove it, or change the objective"


def describe_idle(train: TrainSettings) -> list[str]:
    """Describe settings that have no effect with this objective, one sentence each."""
    notes: list[str] = []
    if train.objective == "orpo" and train.preferences.sft:
        notes.append("preferences.sft has no effect with orpo, whose loss has a supervised term already")
    if train.objective == "kto" and train.preferences.sft:
        notes.append("preferences.sft has no effect with kto, whose loss has no supervised term")
    if train.objective in ("dpo", "orpo"):
        usual = type(train.preferences)()
        names = ("undesirable_weight", "least_score")
        changed = [name for name in names if getattr(train.preferences, name) != getattr(usual, name)]
        if changed:
            notes.append(f"preferences.{', '.join(changed)}: no effect with {train.objective}, only with kto")
    if train.objective != "grpo":
        return notes
    if train.rollouts.updates == 1 and train.policy.loss != "grpo":
        notes.append(
            f"policy.loss: {train.policy.loss} has no effect with one update per batch: every ratio is 1"
        )
    defaults = type(train)()
    rows = [
        name
        for name in ("epochs", "batch_size", "max_rows")
        if getattr(train, name) != getattr(defaults, name)
    ]
    if rows and not train.mix.sft:
        notes.append(f"{', '.join(rows)}: no effect, because grpo without a mix trains on no supervised rows")
    return notes
