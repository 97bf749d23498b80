"""The sandbox for code that a model wrote: no network, only its own files, limits on everything.

Input: source as text. Output: how it ended. `docs/sandbox.md` says what each way guarantees. `inside/` runs
on the far side and imports nothing of ours.
"""

from graftwork.process.sandbox.limits import Limits, SandboxKind, SandboxResult
from graftwork.process.sandbox.run import CodeJob, Sandbox, available, open_sandbox, run_jobs, why_not
from graftwork.process.sandbox.settings import SandboxSettings

__all__ = [
    "CodeJob",
    "Limits",
    "Sandbox",
    "SandboxKind",
    "SandboxResult",
    "SandboxSettings",
    "available",
    "open_sandbox",
    "run_jobs",
    "run_python",
    "why_not",
]


def run_python(source: str, *, limits: Limits, files: dict[str, str] | None = None) -> SandboxResult:
    """Run it like `python file.py`, in the strongest sandbox that this machine supports."""
    return Sandbox(available(), limits).run(source, files=files)
