"""Axolotl: JSONL and the part of the configuration that reads it.

Rules followed (Axolotl's pages on conversation datasets and on RLHF):
- `type: chat_template` reads `messages` with role and content and renders them by the tokenizer's own
  template, so tool calls stay in the text as the model is trained on them;
- with `roles_to_train: []` and `message_field_training`, a turn is trained on if its own flag says so;
  with `train_on_eos: turn`, so is the token that ends such a turn. The flag stands on the last turn
  alone, which trains on the reply and its end and nothing else;
- `rl: dpo` with `type: chat_template.default` reads `messages`, `chosen` and `rejected`, in a
  configuration of its own.
"""

from typing import Any

import yaml

from graftwork.data.export.record import ExportOptions
from graftwork.data.export.sink import Sink
from graftwork.data.export.turns import assistant, plain
from graftwork.files.disk import write_atomic
from graftwork.records.dataset import Dataset, Row, Split

TRAIN_FLAG = "train"
FIELDS = {"role": "role", "content": "content"}


def check_options(options: ExportOptions) -> None:
    del options


def add_row(sink: Sink, split: Split, row: Row) -> None:
    if row.rejected is None:
        turns = [{**plain(message), TRAIN_FLAG: False} for message in row.messages]
        sink.add_line(f"{split}.jsonl", {"messages": [*turns, {**assistant(row.reply), TRAIN_FLAG: True}]})
        return
    pair = {"chosen": assistant(row.reply), "rejected": assistant(row.rejected)}
    sink.add_line(
        f"{split}.preference.jsonl", {"messages": [plain(message) for message in row.messages], **pair}
    )


def finish(sink: Sink, dataset: Dataset, options: ExportOptions) -> tuple[str, ...]:
    del options
    _write_part(sink, dataset, file="axolotl.yaml", ending=".jsonl", reads=_supervised)
    _write_part(sink, dataset, file="axolotl-dpo.yaml", ending=".preference.jsonl", reads=_preference)
    return ("run axolotl in this folder, or put the folder before the paths in the configuration",)


def _supervised(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "ds_type": "json",
        "split": "train",
        "type": "chat_template",
        "chat_template": "tokenizer_default",
        "field_messages": "messages",
        "message_property_mappings": FIELDS,
        "roles_to_train": [],
        "train_on_eos": "turn",
        "message_field_training": TRAIN_FLAG,
    }


def _preference(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "ds_type": "json",
        "split": "train",
        "type": "chat_template.default",
        "field_messages": "messages",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "message_property_mappings": FIELDS,
        "roles": {role: [role] for role in ("system", "user", "assistant", "tool")},
    }


def _write_part(sink: Sink, dataset: Dataset, *, file: str, ending: str, reads: Any) -> None:
    """The split that is trained on under `datasets`, the one that is watched under `test_datasets`."""
    known = {split: f"{split}{ending}" for split in ("train", "validation")}
    here = {split: name for split, name in known.items() if name in sink.rows}
    if not here:
        return
    part: dict[str, Any] = {"chat_template": "tokenizer_default"}
    if reads is _preference:
        part["rl"] = "dpo"
    for split, key in (("train", "datasets"), ("validation", "test_datasets")):
        if split in here:
            part[key] = [reads(f"./{here[split]}")]
    head = f"# Made of the dataset {dataset.content_hash[:12]}, which was rendered for {dataset.base}.\n"
    write_atomic(sink.folder / file, head + _dump(part))


def _dump(value: dict[str, Any]) -> str:
    class Plain(yaml.SafeDumper):
        """Without anchors: people copy single entries."""

        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    text: str = yaml.dump(value, Dumper=Plain, sort_keys=False, allow_unicode=True)
    return text
