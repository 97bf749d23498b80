"""Which kind of configuration a file is, by the keys that only one kind has."""

from graftwork.plan.lint import read_axolotl, read_deepspeed, read_llama_factory, read_training
from graftwork.plan.lint.facts import Configuration, Kind
from graftwork.plan.lint.written import WrittenConfig
from graftwork.records.errors import UserMistake

READERS = {
    "training": read_training.read,
    "deepspeed": read_deepspeed.read,
    "axolotl": read_axolotl.read,
    "llama-factory": read_llama_factory.read,
}
KNOWN_ENOUGH = 2
"""Fields that must be found before a file counts as a training configuration."""


def detect(written: WrittenConfig) -> Kind:
    if ("project",) in written.leaves and any(path[0] == "data" for path in written.leaves):
        return "graft"
    if written.has("train_micro_batch_size_per_gpu", "zero_optimization.stage"):
        return "deepspeed"
    if written.has("sequence_len", "micro_batch_size") and written.has("base_model"):
        return "axolotl"
    if written.has("cutoff_len", "finetuning_type") and written.has("model_name_or_path"):
        return "llama-factory"
    return "training"


def read_foreign(written: WrittenConfig) -> Configuration:
    """A configuration of another tool, by its own reader."""
    kind = detect(written)
    found = READERS[kind](written)
    if len(found.places) < KNOWN_ENOUGH:
        raise UserMistake(
            "this does not look like a training configuration",
            why="hardly any key in it is one that a trainer knows",
            fix="name a graft.yaml, a YAML of TrainingArguments, axolotl or LLaMA-Factory, "
            "or a DeepSpeed JSON",
            where=written.file,
        )
    return found
