"""An adapter made into something to take away: the job, the proof that it is the same, what was written."""

from typing import Literal

from graftwork.records.base import Record

ExportFormat = Literal["merged", "gguf", "adapter"]


class ExportJob(Record):
    """All that the process which merges is told."""

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
    """Of the largest logit."""
    allowed_first: float = 0.0

    @property
    def holds(self) -> bool:
        near = self.largest_difference <= self.allowed_difference * self.largest_logit
        return near and self.same_first >= self.allowed_first


class Merged(Record):
    """What merging found: the proof, and for a base in 4 bits how far that one is away."""

    merged_weights: int
    agreement: Agreement
    to_four_bits: Agreement | None = None


class Exported(Record):
    """What was written, where, and what it came from. `files` maps each file to its SHA-256."""

    run_id: str
    format: ExportFormat
    folder: str
    base: str
    base_fingerprint: str
    adapter_hash: str
    files: dict[str, str]
    merged: Merged | None = None
    gguf: dict[str, str | int | float] = {}
    """What was read back from the GGUF file."""
    words: tuple[str, ...] = ()
