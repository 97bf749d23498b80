"""An adapter, or a prompt in its place, that may be served: content-addressed, with its whole lineage."""

from collections.abc import Sequence
from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Message
from graftwork.records.report import Decision

PROMPT_FILE = "prompt.json"
PROMPT_RUN = "prompt"
"""Placeholder for the training run in the release of a prompt."""
TOOLS = "<tools>"
"""Content of a system turn with tool definitions: such a turn is never replaced."""


class PromptVariant(Record):
    """Text put before the messages of a request. An empty one changes nothing."""

    instruction: str | None = None
    """The system prompt in place of the request's own; None keeps that."""
    examples: tuple[Message, ...] = ()
    """Questions and replies of training rows, right after the system turns."""
    rows: tuple[str, ...] = ()
    """The training rows that the examples come from."""
    optimizer: str = ""
    """Author of the instruction; empty if it is the project's own."""

    def apply(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if self.instruction is not None:
            messages = replace_system(messages, self.instruction)
        opening = next((index for index, turn in enumerate(messages) if turn.role != "system"), len(messages))
        return (*messages[:opening], *self.examples, *messages[opening:])


def replace_system(messages: Sequence[Message], instruction: str) -> tuple[Message, ...]:
    """The messages with this system prompt instead of their own; tool definitions stay after it."""
    tools = [turn.content for turn in messages if turn.role == "system" and TOOLS in turn.content]
    text = "\n\n".join(part for part in (instruction, *tools) if part)
    dialogue = tuple(turn for turn in messages if turn.role != "system")
    return (Message(role="system", content=text), *dialogue) if text else dialogue


class ReleaseFile(Record):
    path: str
    sha256: str
    size: int


class Release(Record):
    """The manifest of a release. Its id is the hash of everything below but the id and the time."""

    id: str
    project: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    adapter_hash: str
    dataset_hash: str
    plan_hash: str
    report_hash: str
    verdict_hash: str
    decision: Decision
    run_id: str
    parent: str | None
    created_at: str
    files: tuple[ReleaseFile, ...]
    settings: dict[str, Any]
    versions: dict[str, str]
    format: Literal[2] = 2
    model: str = "main"
    """The project's model that this release belongs to."""
    tokenizer_fingerprint: str = ""
    licence: str | None = None
    """The license of the base as its files state it; None if they do not."""


class ReleaseEntry(Record):
    """What the index stores about a release besides its manifest: enough to list and to choose."""

    id: str
    model: str
    version: str | None
    base: str
    decision: Decision
    run_id: str
    dataset_hash: str
    parent: str | None
    created_at: str
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    collected_at: str | None = None
    """When its files were taken away as garbage."""


class ReleaseQuery(Record):
    """A query for releases; empty fields match everything."""

    tag: str | None = None
    decision: Decision | None = None
    model: str | None = None
    base: str | None = None
    since: str | None = None
    search: str | None = None
    """Text in the id, version, base, run, tags or notes, in any case."""
    collected: bool = True
    """Whether to include those whose files are gone."""
    limit: int | None = None


class ReleaseNote(Record):
    text: str
    who: str
    when: str


class AliasMove(Record):
    """One move of an alias: who, when, why, from where to where."""

    alias: str
    release_id: str
    previous: str | None
    who: str
    when: str
    why: str
    forced: bool = False
    rollback: bool = False
    verdict_hash: str | None = None
    """The verdict that the move was made on."""


class Garbage(Record):
    """What a collection removed, or would remove."""

    releases: tuple[str, ...]
    blobs: int
    leftovers: int
    bytes: int
    kept: int
    leased: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Releases whose manifests cannot be read: because of them no blob was removed."""
    adopted: tuple[str, ...] = ()
    """Releases found in the store but not in the index: added to the index."""
    refused: tuple[str, ...] = ()
    """Folders in the store that are not in the index and do not verify: ignored."""
    why_kept: dict[str, str] = {}
    readers_unseen: tuple[str, ...] = ()
    """Releases that stay because it is unknown here whether a reader holds them."""
    dry_run: bool = False


ExportFormat = Literal["merged", "gguf", "adapter"]
GgufPrecision = Literal["f32", "bf16", "f16", "q8_0", "q5_1", "q4_1"]
"""Types of the matrices of a GGUF file."""


class ExportJob(Record):
    """All input of the process that merges."""

    folder: str
    """Folder of the process and its result message; not the destination of the export."""
    base_folder: str
    adapter_folder: str
    dataset_folder: str
    to: str
    rows: int = 8
    """Held-out rows on which both must agree."""
    four_bits: bool = False
    """Training used the base in 4 bits: its distance from the merged model is measured too."""
    threads: int | None = None


class Agreement(Record):
    """Two computations of the same logits, compared at every reply token of some rows."""

    rows: int
    positions: int
    dtype: str
    largest_difference: float
    mean_difference: float
    largest_logit: float
    same_first: float
    """Share of the positions at which both choose the same token."""
    allowed_difference: float = 0.0
    """Allowed difference, as a share of the largest logit."""
    allowed_first: float = 0.0

    @property
    def holds(self) -> bool:
        near = self.largest_difference <= self.allowed_difference * self.largest_logit
        return near and self.same_first >= self.allowed_first


class MergeProof(Record):
    """Proof of a merge and, for a base in 4 bits, its distance."""

    merged_weights: int
    agreement: Agreement
    to_four_bits: Agreement | None = None


class ExportedAdapter(Record):
    """What was written, where, and what it came from. `files` maps each file to its SHA-256."""

    run_id: str
    format: ExportFormat
    folder: str
    base: str
    base_fingerprint: str
    adapter_hash: str
    files: dict[str, str]
    merged: MergeProof | None = None
    gguf: dict[str, str | int | float] = {}
    """What was read back from the GGUF file."""
    words: tuple[str, ...] = ()


class Tried(Record):
    """One question, answered by base and release."""

    case_id: str
    question: str
    reference: str
    base_answer: str
    release_answer: str
    answered_by: str
    capture_id: str
    captured_reply: str
    seconds: float
    """Until the complete answer, with all other questions asked at the same time."""
