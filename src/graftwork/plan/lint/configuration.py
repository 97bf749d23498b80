"""A training configuration in one form, and how it is read from each trainer's file.

Input: a parsed file of graft, transformers, DeepSpeed, axolotl or LLaMA-Factory. Output: a Configuration with
the location of each value; the records that rules get and give, and the steps that a configuration means.
`auto`, and what cannot be read as its type, is left out: nothing is guessed in its place. Does not know what
is wrong with the figures.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import yaml

from graftwork.files.config_text import parse_json, parse_yaml
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu
from graftwork.records.plan import Method, ModelShape, Precision

Severity = Literal["error", "warning", "note"]
Kind = Literal["graft", "training", "deepspeed", "axolotl", "llama-factory"]
When = Literal["steps", "epoch", "no", "best"]


class ConfigLocation(Record):
    """Where a value is set: a key of the file with its line, or an option of the command line."""

    key: str
    line: int | None = None


class Configuration(Record):
    """The settings of a run. None: not set, and not guessed."""

    file: str
    kind: Kind
    places: dict[str, ConfigLocation] = {}
    """Location of each field below."""
    unfilled: dict[str, str] = {}
    """Keys whose value is a placeholder of a template."""
    texts_for_numbers: dict[str, str] = {}
    """Keys whose number YAML 1.1 reads as text: `2e-4` lacks the required decimal point."""

    model: str | None = None
    method: Method | None = None
    algorithm: str | None = None
    answers: int | None = None
    """Answers sampled per prompt."""
    reward_scale: str | None = None
    """Divisor of rewards: `group` is the standard deviation of a group."""
    rank: int | None = None
    alpha: float | None = None
    use_rslora: bool = False
    targets: tuple[str, ...] | None = None
    learning_rate: float | None = None
    optimizer: str | None = None

    rows: int | None = None
    test_rows: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    gpus: int | None = None
    batch: int | None = None
    """Rows of an optimizer step, if the file states them: DeepSpeed's train_batch_size, our batch_size."""
    warmup_steps: int | None = None
    warmup_ratio: float | None = None

    save_when: When | None = None
    save_steps: int | None = None
    eval_when: When | None = None
    eval_steps: int | None = None
    keep_best: bool = False
    best_metric: str | None = None
    stops_early: bool = False

    max_length: int | None = None
    packing: bool | None = None
    document_masks: bool | None = None
    precision: Precision | None = None
    both_halves: bool = False
    """bf16 and fp16 are both switched on."""
    weights_dtype: Precision | None = None
    """Type that the frozen or trained weights are loaded in, if it is set separately from `precision`."""
    bits: int | None = None
    compute_dtype: Precision | None = None
    """Type that 4-bit weights are multiplied in."""
    flash_attention: bool | None = None
    tf32: bool | None = None
    recompute: bool | None = None
    """Gradient checkpointing."""
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_weights: bool = False

    gpu: str | None = None
    on_cpu: bool = False
    ram_gib: float | None = None
    spot: bool | None = None
    mirror: str | None = None
    deadline_minutes: float | None = None
    expected_minutes: float | None = None

    stated_batch: int | None = None
    stated_epoch_steps: int | None = None
    stated_steps: int | None = None
    stated_weights_gb: float | None = None
    stated_memory_gb: float | None = None
    stated_download_gb: float | None = None
    stated_trainable: int | None = None
    serving_gb: float | None = None
    target_rate: float | None = None
    """A rate to be proven by held-out cases."""
    data_model: str | None = None
    deployed_model: str | None = None

    def where(self, *fields: str) -> str:
        """File and line of the first of these fields that is set."""
        location = next((self.places[field] for field in fields if field in self.places), None)
        if location is None:
            return self.file
        if location.key.startswith("--"):
            return location.key
        return f"{self.file}:{location.line}" if location.line else self.file

    def key(self, *fields: str) -> str:
        """The name that this file gives to the first of these fields that is set."""
        return next((self.places[field].key for field in fields if field in self.places), "")


class Peaks(Record):
    """GiB of a GPU at its largest micro-batch, computed: as configured, and with gradient checkpointing."""

    as_set: float
    recomputed: float
    tokens: int
    """Tokens of the longest row within the limit."""


class LintContext(Record):
    """Facts besides the file: the model's shape, the GPU, the lengths of the rows."""

    shape: ModelShape | None = None
    parameters: int | None = None
    trainable: int | None = None
    """Trainable parameters of the named adapter on this shape."""
    gpu: Gpu | None = None
    on_cpu: bool = False
    lengths: tuple[int, ...] = ()
    peaks: Peaks | None = None


class LintFinding(Record):
    """One problem in a configuration."""

    rule: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str
    key: str = ""
    source: str = ""


Path_ = tuple[str, ...]
NUMBER_AS_TEXT = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
PLACEHOLDER = re.compile(r"YOUR[_ -]|^<[^>]+>$|CHANGE[_ -]?ME|^TODO\b|^\.\.\.$", re.IGNORECASE)


class WrittenConfig(NamedTuple):
    """All leaves of a file by path, with lists as a whole, and the lines of its keys if known."""

    file: str
    leaves: dict[Path_, Any]
    lines: dict[Path_, int]

    def named(self, name: str) -> Path_ | None:
        """The leaf whose path has this suffix: `save_steps`, or `lora.r` if only the last part is
        ambiguous.
        """
        parts = tuple(name.split("."))
        return min((path for path in self.leaves if path[-len(parts) :] == parts), key=len, default=None)

    def location(self, path: Path_) -> ConfigLocation:
        return ConfigLocation(key=".".join(path), line=self.lines.get(path))

    def has(self, *names: str) -> bool:
        return any(self.named(name) is not None for name in names)


def read_written(text: str, *, file: str) -> WrittenConfig:
    is_json = file.endswith(".json") or text.lstrip().startswith("{")
    if is_json:
        content: Any = parse_json(text, where=file)
        try:
            node = parse_yaml(text, where="").root
        except UserError:
            # JSON is nearly YAML; where it is not (tabs), lines are not known, which spoils nothing else.
            node = None
    else:
        content, node = parse_yaml(text, where=file)
    if not isinstance(content, dict):
        raise UserError(
            "this is not a mapping of keys", fix="specify a configuration in YAML or JSON", where=file
        )
    return WrittenConfig(file, _leaves(content), _lines(node))


def matching_texts(source: WrittenConfig, pattern: re.Pattern[str]) -> dict[str, str]:
    """Keys whose text has the pattern, such as NUMBER_AS_TEXT or PLACEHOLDER."""
    return {
        ".".join(path): value
        for path, value in source.leaves.items()
        if isinstance(value, str) and pattern.search(value)
    }


def _lines(node: yaml.Node | None, prefix: Path_ = ()) -> dict[Path_, int]:
    lines: dict[Path_, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*prefix, str(key.value))
            lines[path] = key.start_mark.line + 1
            lines.update(_lines(value, path))
    return lines


def _leaves(content: dict[Any, Any], prefix: Path_ = ()) -> dict[Path_, Any]:
    leaves: dict[Path_, Any] = {}
    for key, value in content.items():
        path = (*prefix, str(key))
        leaves |= _leaves(value, path) if isinstance(value, dict) else {path: value}
    return leaves


class RuleHit(NamedTuple):
    """A finding of a rule, and the fields that it concerns, the most relevant first."""

    what: str
    why: str
    fix: str
    fields: tuple[str, ...]


Check = Callable[[Configuration, LintContext], Iterator[RuleHit]]


class LintRule(NamedTuple):
    """A check with its name and severity."""

    id: str
    severity: Severity
    check: Check
    source: str = ""


def rule(id_: str, severity: Severity, source: str = "") -> Callable[[Check], LintRule]:
    """Register the function below as a rule; the rules of a module apply in order of definition."""
    return lambda check: LintRule(id_, severity, check, source)


VOWEL_SOUNDS = "AEFHILMNORSX"
"""Letters whose name begins with a vowel: an RTX, an A100, a T4."""


def a(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name[:1].upper() in VOWEL_SOUNDS else 'a'} {name}"


class Steps(NamedTuple):
    epoch: int | None
    """None if only the number of steps is given."""
    total: int


def effective_batch(config: Configuration) -> int | None:
    """Rows of one optimizer step; assumes one GPU unless the number is set."""
    if config.kind == "graft":
        return config.batch
    if config.micro_batch is not None:
        return config.micro_batch * (config.accumulation or 1) * (config.gpus or 1)
    return config.batch


def count_steps(config: Configuration) -> Steps | None:
    """Count as transformers does: batches per GPU first, then those that make an update, the last one
    smaller.
    """
    batch, epoch = effective_batch(config), None
    if config.rows is not None and batch:
        epoch = math.ceil(config.rows / batch)
        if config.micro_batch is not None:
            batches = math.ceil(config.rows / (config.micro_batch * (config.gpus or 1)))
            epoch = max(math.ceil(batches / (config.accumulation or 1)), 1)
    if config.max_steps is not None and config.max_steps > 0:
        return Steps(epoch, config.max_steps)
    if epoch is None or config.epochs is None:
        return None
    return Steps(epoch, math.ceil(epoch * config.epochs))


def warmup_of(config: Configuration, total: int) -> int | None:
    if config.warmup_steps is not None:
        return config.warmup_steps
    return math.ceil(config.warmup_ratio * total) if config.warmup_ratio is not None else None


def interval_of(when: str | None, steps: int | None) -> int | None:
    """Steps between two events, if they are counted in steps."""
    return steps if when in (None, "steps") else None


Convert = Callable[[Any], Any]

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "no": "float32",
}
WHEN = {"steps": "steps", "epoch": "epoch", "no": "no", "best": "best"}


class Names(NamedTuple):
    """Names of a field, the usual name first, and its parser."""

    names: tuple[str, ...]
    read: Convert


def number(value: Any) -> float | None:
    """A number, even if YAML read it as text."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        read = float(value)
    except (TypeError, ValueError):
        return None
    return read if math.isfinite(read) else None


def whole(value: Any) -> int | None:
    read = number(value)
    return int(read) if read is not None and read == int(read) else None


def positive(value: Any) -> int | None:
    read = whole(value)
    return read if read is not None and read > 0 else None


def yes(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(
            value.lower()
        )
    return bool(value) if isinstance(value, bool | int) else None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def dtype(value: Any) -> str | None:
    if value is False:
        return "float32"
    return DTYPES.get(str(value).removeprefix("torch.").lower())


def when(value: Any) -> str | None:
    # `no` without quotes is False to YAML 1.1.
    return "no" if value is False else WHEN.get(str(value).lower())


def names_list(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value else None
    return tuple(str(part) for part in value) if isinstance(value, list) and value else None


class FoundSettings:
    """The settings of a file by field, each with its location."""

    def __init__(self, source: WrittenConfig, fields: Mapping[str, Names]) -> None:
        self._written = source
        self.values: dict[str, Any] = {}
        self.places: dict[str, ConfigLocation] = {}
        for field, names in fields.items():
            for name in names.names:
                path = source.named(name)
                value = names.read(source.leaves[path]) if path else None
                if path is not None and value is not None:
                    self.values[field] = value
                    self.places[field] = source.location(path)
                    break

    def set(self, field: str, value: Any, *, from_field: str) -> None:
        """Set a value that follows from another field; it gets that field's location."""
        self.values[field] = value
        self.places[field] = self.places[from_field]

    def move(self, field: str, to: str, value: Any) -> None:
        """Move what was read as `field` to `to`."""
        self.values.pop(field, None)
        self.values[to], self.places[to] = value, self.places.pop(field)

    def settle_precision(self) -> None:
        """Turn the switches `bf16` and `fp16` into one precision; both at once are recorded."""
        on = [field for field in ("bf16", "fp16") if self.values.pop(field, None)]
        if len(on) == 2:
            self.set("both_halves", True, from_field="fp16")
        for field in on:
            self.move(field, "precision", DTYPES[field])
        for field, bits in (("four", 4), ("eight", 8)):
            if self.values.pop(field, None):
                self.move(field, "bits", bits)

    def configure(self, kind: Kind) -> Configuration:
        source = self._written
        unfilled = matching_texts(source, PLACEHOLDER)
        texts = {} if source.file.endswith(".json") else matching_texts(source, NUMBER_AS_TEXT)
        by_key = {
            key: source.location(tuple(key.split(".")))
            for key in (*unfilled, *texts)
            if tuple(key.split(".")) in source.leaves
        }
        return Configuration.model_validate(
            {
                **self.values,
                "file": source.file,
                "kind": kind,
                "places": {**by_key, **self.places},
                "unfilled": unfilled,
                "texts_for_numbers": texts,
            }
        )


STATED = {
    "rows": Names(("train_rows", "train_examples", "num_train_samples", "train_samples"), positive),
    "test_rows": Names(("test_rows", "test_examples"), positive),
    "gpus": Names(("num_gpus", "n_gpus", "world_size", "num_processes", "cards"), positive),
    "gpu": Names(("gpu", "gpu_type", "gpu_name"), text),
    "on_cpu": Names(("use_cpu", "no_cuda"), yes),
    "ram_gib": Names(("ram_gib", "ram_gb"), number),
    "spot": Names(("spot", "use_spot", "interruptible", "use_spot_instances"), yes),
    "mirror": Names(("checkpoint_mirror", "checkpoint_s3_uri", "mirror", "hub_model_id"), text),
    "stated_batch": Names(("effective_batch_size", "effective_batch", "global_batch_size"), positive),
    "stated_epoch_steps": Names(("steps_per_epoch",), positive),
    "stated_steps": Names(("total_steps", "total_training_steps"), positive),
    "stated_weights_gb": Names(("base_model_memory_gb", "weights_gb"), number),
    "stated_memory_gb": Names(("training_memory_gb", "memory_gb"), number),
    "stated_download_gb": Names(("model_download_gb", "download_gb"), number),
    "stated_trainable": Names(("trainable_params", "trainable_parameters"), positive),
    "serving_gb": Names(("serving_memory_gb", "deploy_memory_gb"), number),
    "target_rate": Names(("target_success_rate", "success_rate"), number),
    "expected_minutes": Names(("expected_minutes",), number),
    "deadline_minutes": Names(("deadline_minutes", "session_minutes", "max_runtime_minutes"), number),
    "data_model": Names(("data_model", "logged_model", "teacher_model"), text),
    "deployed_model": Names(("deployed_model", "serving_model"), text),
    "algorithm": Names(("algorithm", "rl_algorithm"), text),
}


TRAINING_FIELDS = {
    "model": Names(
        ("model_name_or_path", "base_model", "model_name", "model.name", "model.base", "model.id"), text
    ),
    "rank": Names(("lora_r", "lora_rank", "lora.r", "lora.rank", "adapter.r", "adapter.rank", "r"), positive),
    "alpha": Names(("lora_alpha", "lora.alpha", "adapter.alpha"), number),
    "use_rslora": Names(("use_rslora",), yes),
    "targets": Names(("target_modules", "lora_target_modules", "lora_target"), names_list),
    "learning_rate": Names(("learning_rate", "lr"), number),
    "answers": Names(("num_generations",), positive),
    "reward_scale": Names(("scale_rewards",), text),
    "optimizer": Names(("optim", "optimizer"), text),
    "epochs": Names(("num_train_epochs", "num_epochs", "epochs"), number),
    "max_steps": Names(("max_steps",), positive),
    "micro_batch": Names(("per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"), positive),
    "accumulation": Names(("gradient_accumulation_steps", "gradient_accumulation"), positive),
    "warmup_steps": Names(("warmup_steps",), number),
    "warmup_ratio": Names(("warmup_ratio",), number),
    "save_when": Names(("save_strategy",), when),
    "save_steps": Names(("save_steps",), number),
    "eval_when": Names(("eval_strategy", "evaluation_strategy"), when),
    "eval_steps": Names(("eval_steps",), number),
    "keep_best": Names(("load_best_model_at_end",), yes),
    "best_metric": Names(("metric_for_best_model",), text),
    "patience": Names(("early_stopping_patience", "early_stopping"), whole),
    "max_length": Names(("max_seq_length", "max_seq_len", "max_length", "model_max_length"), positive),
    "packing": Names(("packing",), yes),
    "document_masks": Names(("document_masks", "padding_free", "packing_document_masks"), yes),
    "packing_strategy": Names(("packing_strategy",), text),
    "bf16": Names(("bf16",), yes),
    "fp16": Names(("fp16",), yes),
    "precision": Names(("mixed_precision", "precision"), dtype),
    "weights_dtype": Names(("torch_dtype", "model_dtype", "dtype"), dtype),
    "four": Names(("load_in_4bit",), yes),
    "eight": Names(("load_in_8bit",), yes),
    "compute_dtype": Names(("bnb_4bit_compute_dtype", "compute_dtype"), dtype),
    "flash_attention": Names(("use_flash_attention", "use_flash_attention_2", "flash_attention"), yes),
    "attention": Names(("attn_implementation",), text),
    "tf32": Names(("tf32",), yes),
    "recompute": Names(("gradient_checkpointing",), yes),
    "method_name": Names(("method", "adapter.method", "adapter.type", "finetuning_type"), text),
    **STATED,
}


def read_training(source: WrittenConfig) -> Configuration:
    settings = FoundSettings(source, TRAINING_FIELDS)
    settle(settings)
    return settings.configure("training")


def settle(settings: FoundSettings) -> None:
    """Merge names that mean the same thing into one field."""
    values = settings.values
    settings.settle_precision()
    warmup = values.get("warmup_steps")
    if warmup is not None:
        # Below one it is a share to transformers 5 as well.
        if 0 < warmup < 1:
            settings.move("warmup_steps", "warmup_ratio", warmup)
        else:
            values["warmup_steps"] = int(warmup)
    for field in ("save_steps", "eval_steps"):
        # Intervals below one are shares of the run to transformers; there the rules have nothing to find.
        steps = values.pop(field, None)
        if steps is not None and steps >= 1:
            values[field] = int(steps)
    if values.pop("attention", None) == "flash_attention_2" and "flash_attention" not in values:
        settings.set("flash_attention", True, from_field="attention")
    strategy = values.pop("packing_strategy", None)
    if strategy in ("bfd", "bfd_split", "bfd-requeue") and values.get("flash_attention"):
        # TRL's best-fit packing keeps rows apart by their positions, which only flash attention obeys.
        values.setdefault("document_masks", True)
    if values.pop("patience", None):
        settings.set("stops_early", True, from_field="patience")
    name = str(values.pop("method_name", "")).lower()
    if name in ("lora", "qlora", "dora", "full", "sft_full"):
        settings.set("method", name.removeprefix("sft_"), from_field="method_name")
    elif "rank" in values:
        settings.set("method", "lora", from_field="rank")
    if values.get("method", "lora") == "lora" and values.get("bits") == 4:
        settings.set("method", "qlora", from_field="bits")


AXOLOTL_FIELDS = {
    **TRAINING_FIELDS,
    "model": Names(("base_model",), text),
    "micro_batch": Names(("micro_batch_size",), positive),
    "epochs": Names(("num_epochs",), number),
    "max_length": Names(("sequence_len",), positive),
    "packing": Names(("sample_packing",), yes),
    "method_name": Names(("adapter",), text),
    "patience": Names(("early_stopping_patience",), whole),
    "saves_per_epoch": Names(("saves_per_epoch",), positive),
    "evals_per_epoch": Names(("evals_per_epoch",), positive),
}


def read_axolotl(source: WrittenConfig) -> Configuration:
    settings = FoundSettings(source, AXOLOTL_FIELDS)
    for field, when_field in (("saves_per_epoch", "save_when"), ("evals_per_epoch", "eval_when")):
        if settings.values.pop(field, None) is not None:
            settings.set(when_field, "epoch", from_field=field)
    settings.values["document_masks"] = True
    settle(settings)
    # Without an adapter all of the weights are trained.
    settings.values.setdefault("method", "full")
    return settings.configure("axolotl")


DEEPSPEED_FIELDS = {
    **{name: names for name, names in STATED.items() if name != "stated_batch"},
    "batch": Names(("train_batch_size",), positive),
    "micro_batch": Names(("train_micro_batch_size_per_gpu",), positive),
    "accumulation": Names(("gradient_accumulation_steps",), positive),
    "bf16": Names(("bf16.enabled", "bfloat16.enabled"), yes),
    "fp16": Names(("fp16.enabled",), yes),
    "zero_stage": Names(("zero_optimization.stage",), whole),
    "offload_optimizer": Names(("offload_optimizer.device",), text),
    "offload_weights": Names(("offload_param.device",), text),
    "cpu_offload": Names(("zero_optimization.cpu_offload",), yes),
    "optimizer": Names(("optimizer.type",), text),
    "learning_rate": Names(("optimizer.params.lr", "scheduler.params.warmup_max_lr"), number),
    "warmup_steps": Names(("scheduler.params.warmup_num_steps",), positive),
    "max_steps": Names(("scheduler.params.total_num_steps",), positive),
    "model": Names(("model", "model_name_or_path"), text),
    "epochs": Names(("num_train_epochs", "epochs"), number),
    "method_name": Names(("method",), text),
}


def read_deepspeed(source: WrittenConfig) -> Configuration:
    settings = FoundSettings(source, DEEPSPEED_FIELDS)
    values = settings.values
    settings.settle_precision()
    for field in ("offload_optimizer", "offload_weights"):
        values[field] = values.get(field) in ("cpu", "nvme")
    if values.pop("cpu_offload", None):
        settings.move("cpu_offload", "offload_optimizer", True)
    name = values.pop("method_name", None)
    if name in ("lora", "qlora", "dora", "full"):
        settings.move("method_name", "method", name)
    return settings.configure("deepspeed")


LLAMA_FACTORY_FIELDS = {
    **TRAINING_FIELDS,
    "max_length": Names(("cutoff_len",), positive),
    "packing": Names(("packing", "neat_packing"), yes),
    "document_masks": Names(("neat_packing",), yes),
    "method_name": Names(("finetuning_type",), text),
    "attention": Names(("flash_attn",), text),
    "quantized": Names(("quantization_bit",), whole),
}


def read_llama_factory(source: WrittenConfig) -> Configuration:
    settings = FoundSettings(source, LLAMA_FACTORY_FIELDS)
    values = settings.values
    if values.pop("quantized", None) == 4:
        settings.set("bits", 4, from_field="quantized")
    if values.get("attention") == "fa2":
        values["attention"] = "flash_attention_2"
    settle(settings)
    if values.get("method") == "lora":
        values.setdefault("rank", 8)
    return settings.configure("llama-factory")


GRAFT_FIELDS = {
    "model": ("base",),
    "method": ("train", "method"),
    "rank": ("train", "rank"),
    "alpha": ("train", "alpha"),
    "use_rslora": ("train", "use_rslora"),
    "learning_rate": ("train", "learning_rate"),
    "algorithm": ("train", "objective"),
    "answers": ("train", "rollouts", "num_generations"),
    "reward_scale": ("train", "policy", "scale_rewards"),
    "epochs": ("train", "epochs"),
    "batch": ("train", "batch_size"),
    "gpus": ("train", "processes"),
    "warmup_ratio": ("train", "warmup_ratio"),
    "save_steps": ("train", "checkpoint_every"),
    "eval_steps": ("train", "eval", "every"),
    "best_metric": ("train", "eval", "metric"),
    "max_length": ("data", "max_tokens"),
    "offload_optimizer": ("train", "offload"),
    "mirror": ("train", "run", "mirror"),
    "deadline_minutes": ("train", "run", "deadline_minutes"),
    "precision": ("train", "precision"),
    "packing": ("train", "packing"),
    "targets": ("train", "target_modules"),
    "ram_gib": ("plan", "memory_limit_gib"),
}


def read_graft(settings: dict[str, Any], source: WrittenConfig, *, model: str = "") -> Configuration:
    """`settings` are those of `model`; its own keys are looked for first."""
    values: dict[str, Any] = {}
    locations: dict[str, ConfigLocation] = {}
    for field, path in GRAFT_FIELDS.items():
        value = _at(settings, path)
        if value is not None:
            values[field] = value
            locations[field] = _place(source, path, model)
    if values.get("precision") == "auto":
        del values["precision"], locations["precision"]
    # Packed rows never see each other here, whatever the switch says.
    values["packing"], values["document_masks"] = values.get("packing") != "off", True
    if values.get("targets") == "all":
        del values["targets"]
    values["save_when"] = "steps"
    during = _at(settings, ("train", "eval")) or {}
    values["eval_when"] = "steps" if during.get("every") else "no"
    values["stops_early"] = during.get("early_stopping") is not None
    values["zero_stage"] = {"zero2": 2, "zero3": 3, "fsdp": 3}.get(str(_at(settings, ("train", "strategy"))))
    # The strictest rate of the gate that is held by the lower bound of its interval.
    rates = [
        rule["over"]
        for rule in _at(settings, ("gate", "rules")) or []
        if rule.get("over") is not None and 0 < rule["over"] < 1 and rule.get("bound") in (None, "lower")
    ]
    values["target_rate"] = max(rates, default=None)
    locations["target_rate"] = _place(source, ("gate", "rules"), model)
    return Configuration.model_validate(
        {
            **values,
            "file": source.file,
            "kind": "graft",
            "places": {k: v for k, v in locations.items() if v.line},
        }
    )


def _at(settings: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings


def _place(source: WrittenConfig, path: tuple[str, ...], model: str) -> ConfigLocation:
    for tried in (("models", model, *path), path):
        if tried in source.leaves:
            return source.location(tried)
    return ConfigLocation(key=".".join(path))


READERS = {
    "training": read_training,
    "deepspeed": read_deepspeed,
    "axolotl": read_axolotl,
    "llama-factory": read_llama_factory,
}
KNOWN_ENOUGH = 2
"""Fields that must be found before a file counts as a training configuration."""


def detect(source: WrittenConfig) -> Kind:
    if ("project",) in source.leaves and any(path[0] == "data" for path in source.leaves):
        return "graft"
    if source.has("train_micro_batch_size_per_gpu", "zero_optimization.stage"):
        return "deepspeed"
    if source.has("sequence_len", "micro_batch_size") and source.has("base_model"):
        return "axolotl"
    if source.has("cutoff_len", "finetuning_type") and source.has("model_name_or_path"):
        return "llama-factory"
    return "training"


def read_foreign(source: WrittenConfig) -> Configuration:
    """A configuration of another tool, by its own reader."""
    kind = detect(source)
    config = READERS[kind](source)
    if len(config.places) < KNOWN_ENOUGH:
        raise UserError(
            "this does not look like a training configuration",
            why="hardly any of its keys belongs to a trainer",
            fix="specify a graft.yaml, a YAML of TrainingArguments, axolotl or LLaMA-Factory, or a "
            "DeepSpeed JSON",
            where=source.file,
        )
    return config
