"""A training configuration in one form, and its context: model, card, lengths of rows.

In: what a reader found, what the command line adds. Out: records for the rules. Does not know any
file format, nor what is wrong with the figures.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import yaml

from graftwork.files.config_text import parse_json, parse_yaml
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
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
    """Where each field below was found."""
    unfilled: dict[str, str] = {}
    """Keys whose value is a placeholder of a template."""
    texts_for_numbers: dict[str, str] = {}
    """Keys whose number YAML 1.1 reads as a text: `2e-4` lacks the point that it asks for."""

    model: str | None = None
    method: Method | None = None
    algorithm: str | None = None
    answers: int | None = None
    """Answers sampled to a prompt."""
    reward_scale: str | None = None
    """What rewards are divided by: `group` is the deviation of a group."""
    rank: int | None = None
    alpha: float | None = None
    stabilised: bool = False
    targets: tuple[str, ...] | None = None
    learning_rate: float | None = None
    optimizer: str | None = None

    rows: int | None = None
    test_rows: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    cards: int | None = None
    batch: int | None = None
    """Rows of an optimizer step, where the file fixes them: DeepSpeed's train_batch_size, our batch_size."""
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
    """What the frozen or trained weights are loaded in, where it is set separately from `precision`."""
    bits: int | None = None
    compute_dtype: Precision | None = None
    """What weights of four bits are multiplied in."""
    flash_attention: bool | None = None
    tf32: bool | None = None
    recompute: bool | None = None
    """Gradient checkpointing."""
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_weights: bool = False

    gpu: str | None = None
    on_processor: bool = False
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
    """A rate that held-out cases must prove."""
    data_model: str | None = None
    deployed_model: str | None = None

    def where(self, *fields: str) -> str:
        """File and line of the first of these fields that is set."""
        place = next((self.places[field] for field in fields if field in self.places), None)
        if place is None:
            return self.file
        if place.key.startswith("--"):
            return place.key
        return f"{self.file}:{place.line}" if place.line else self.file

    def key(self, *fields: str) -> str:
        """The name that this file gives to the first of these fields that is set."""
        return next((self.places[field].key for field in fields if field in self.places), "")


class Peaks(Record):
    """GiB of a card at its largest micro-batch, computed: as it is set, and with gradient checkpointing."""

    as_set: float
    recomputed: float
    tokens: int
    """Of the longest row that the limit lets through."""


class LintContext(Record):
    """What is known besides the file: the model's shape, the card, the lengths of the rows."""

    shape: ModelShape | None = None
    parameters: int | None = None
    trainable: int | None = None
    """What the named adapter has on this shape."""
    gpu: Gpu | None = None
    on_processor: bool = False
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
    """All leaves of a file by their path, lists whole, and the lines of its keys where they are known."""

    file: str
    leaves: dict[Path_, Any]
    lines: dict[Path_, int]

    def named(self, name: str) -> Path_ | None:
        """The leaf whose path ends so: `save_steps`, or `lora.r` where the last part alone is too short."""
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
        except UserMistake:
            # JSON is nearly YAML; where it is not (tabs), lines are not known, which spoils nothing else.
            node = None
    else:
        content, node = parse_yaml(text, where=file)
    if not isinstance(content, dict):
        raise UserMistake(
            "this is not a mapping of keys", fix="name a configuration in YAML or JSON", where=file
        )
    return WrittenConfig(file, _leaves(content), _lines(node))


def matching_texts(written: WrittenConfig, pattern: re.Pattern[str]) -> dict[str, str]:
    """Keys whose text has the pattern, such as NUMBER_AS_TEXT or PLACEHOLDER."""
    return {
        ".".join(path): value
        for path, value in written.leaves.items()
        if isinstance(value, str) and pattern.search(value)
    }


def _lines(node: yaml.Node | None, prefix: Path_ = ()) -> dict[Path_, int]:
    found: dict[Path_, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*prefix, str(key.value))
            found[here] = key.start_mark.line + 1
            found.update(_lines(value, here))
    return found


def _leaves(content: dict[Any, Any], prefix: Path_ = ()) -> dict[Path_, Any]:
    found: dict[Path_, Any] = {}
    for key, value in content.items():
        here = (*prefix, str(key))
        found |= _leaves(value, here) if isinstance(value, dict) else {here: value}
    return found


class RuleHit(NamedTuple):
    """What a rule found, and the fields that it concerns, the most relevant first."""

    what: str
    why: str
    fix: str
    fields: tuple[str, ...]


Check = Callable[[Configuration, LintContext], Iterator[RuleHit]]


class LintRule(NamedTuple):
    """A check with its name and how severe what it finds is."""

    id: str
    severity: Severity
    check: Check
    source: str = ""


def rule(id_: str, severity: Severity, source: str = "") -> Callable[[Check], LintRule]:
    """Makes a rule of the check below it; the rules of a module apply in the order in which they stand."""
    return lambda check: LintRule(id_, severity, check, source)


SPOKEN_WITH_A_VOWEL = "AEFHILMNORSX"
"""Letters whose name begins with a vowel: an RTX, an A100, a T4."""


def a(name: str) -> str:
    """The name with its article."""
    return f"{'an' if name[:1].upper() in SPOKEN_WITH_A_VOWEL else 'a'} {name}"


class Steps(NamedTuple):
    epoch: int | None
    """None where only the number of steps is given."""
    total: int


def effective_batch(config: Configuration) -> int | None:
    """Rows of one optimizer step; one card unless the number is set."""
    if config.kind == "graft":
        return config.batch
    if config.micro_batch is not None:
        return config.micro_batch * (config.accumulation or 1) * (config.cards or 1)
    return config.batch


def count_steps(config: Configuration) -> Steps | None:
    """As transformers counts: batches a card first, then those that make an update, the last one smaller."""
    batch, epoch = effective_batch(config), None
    if config.rows is not None and batch:
        epoch = math.ceil(config.rows / batch)
        if config.micro_batch is not None:
            batches = math.ceil(config.rows / (config.micro_batch * (config.cards or 1)))
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
    """Steps between two events, where they are counted in steps."""
    return steps if when in (None, "steps") else None
