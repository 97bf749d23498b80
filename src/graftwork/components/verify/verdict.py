"""What verification found out about one source: facts, a verdict for every case, evidence. Records only."""

from typing import Any

from pydantic import Field

from graftwork.records.base import Record


class SourceFacts(Record):
    """What a source says by itself, read in the sandbox before any of it ran."""

    syntax: str = ""
    imports: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    defines: bool = False
    public: tuple[str, ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    effects: tuple[int, ...] = ()
    """Lines that do something on import."""
    complexity: int = 0
    lines: int = 0
    optimisations: tuple[str, ...] = ()
    statements: tuple[tuple[str, str], ...] = ()
    quality: tuple[str, ...] = ()
    literals: tuple[Any, ...] = ()


class SourceVerdict(Record):
    """One source against the cases of a stage. `cases` has a reason for each that failed, else no text."""

    ok: bool
    reason: str = ""
    cases: dict[str, str] = {}
    facts: SourceFacts = SourceFacts()
    values: str = ""
    """A hash of what all calls gave, drawn inputs included: equal for sources that behave alike."""
    shape_ok: bool = True
    """Whether every value has the type that the spec states."""

    @property
    def passed(self) -> int:
        return sum(not reason for reason in self.cases.values())

    @property
    def share(self) -> float:
        return self.passed / len(self.cases) if self.cases else 0.0


class Evidence(Record):
    """What a source that holds its cases costs, and how well the cases test it."""

    events: int
    peak_bytes: int
    ran: int
    executable: int
    missed: tuple[int, ...] = ()

    @property
    def coverage(self) -> float | None:
        return self.ran / self.executable if self.executable else None


class MutationScore(Record):
    """How many small changes of a source its cases notice."""

    mutants: int
    killed: int
    survived: tuple[int, ...] = Field((), description="Lines of changes that no case noticed.")

    @property
    def score(self) -> float | None:
        return self.killed / self.mutants if self.mutants else None
