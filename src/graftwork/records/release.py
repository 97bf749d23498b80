"""An adapter, or a prompt in its place, that may be served: content-addressed, with its whole lineage."""

from collections.abc import Sequence
from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Message
from graftwork.records.report import Decision

PROMPT_FILE = "prompt.json"
PROMPT_RUN = "prompt"
"""What the release of a prompt has in place of a training run."""
TOOLS = "<tools>"
"""What a system turn with tool definitions holds: such a turn is never replaced."""


class PromptVariant(Record):
    """What is put before the messages of a request. An empty one changes nothing."""

    instruction: str | None = None
    """The system prompt in place of the request's own; None keeps that."""
    examples: tuple[Message, ...] = ()
    """Questions and replies of training rows, right after the system turns."""
    rows: tuple[str, ...] = ()
    """The training rows that the examples are."""
    optimizer: str = ""
    """Who wrote the instruction; empty if it is the project's own."""

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
    """Which of the project's models this is."""
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
    """Which releases are asked for; what is not given does not matter."""

    tag: str | None = None
    decision: Decision | None = None
    model: str | None = None
    base: str | None = None
    since: str | None = None
    search: str | None = None
    """Text in the id, version, base, run, tags or notes, in any case."""
    collected: bool = True
    """Whether those whose files are gone are meant, too."""
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
    """What a collection took away, or would take away."""

    releases: tuple[str, ...]
    blobs: int
    leftovers: int
    bytes: int
    kept: int
    leased: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Releases whose manifests cannot be read: for their sake no blob was taken."""
    adopted: tuple[str, ...] = ()
    """Releases found in the store but not in the index: added to the index."""
    refused: tuple[str, ...] = ()
    """Folders in the store that are not in the index and do not verify: ignored."""
    why_kept: dict[str, str] = {}
    readers_unseen: tuple[str, ...] = ()
    """Releases that stay because it cannot be found out here whether a reader holds them."""
    dry_run: bool = False


ExportFormat = Literal["merged", "gguf", "adapter"]
GgufPrecision = Literal["f32", "bf16", "f16", "q8_0", "q5_1", "q4_1"]
"""The types that the matrices of a GGUF file can have."""


class ExportJob(Record):
    """All input of the process that merges."""

    folder: str
    """Where it works and leaves its word; not where the result goes."""
    base_folder: str
    adapter_folder: str
    dataset_folder: str
    to: str
    rows: int = 8
    """Held-out rows on which both ways must give the same."""
    four_bits: bool = False
    """Training saw the base in 4 bits: how far that is from the merged model is measured too."""
    threads: int | None = None


class Agreement(Record):
    """Two ways to the same logits, compared at every reply token of some rows."""

    rows: int
    positions: int
    dtype: str
    largest_difference: float
    mean_difference: float
    largest_logit: float
    same_first: float
    """Share of the positions at which both would say the same token."""
    allowed_difference: float = 0.0
    """Allowed difference, as a share of the largest logit."""
    allowed_first: float = 0.0

    @property
    def holds(self) -> bool:
        near = self.largest_difference <= self.allowed_difference * self.largest_logit
        return near and self.same_first >= self.allowed_first


class MergeProof(Record):
    """What merging found: the proof, and for a base in 4 bits how far that one is away."""

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
