"""Which way to shut code in works on this machine, found by trying.

In: nothing. Out: the strongest way that works, remembered for this process; EnvironmentLacks with what
each one said where none does.
"""

import os
import shutil
import sys
from functools import lru_cache

from graftwork.process.sandbox.limits import Limits
from graftwork.process.sandbox.result import SandboxKind
from graftwork.process.sandbox.run import BoxNotMade, Sandbox, run_in_box
from graftwork.process.sandbox.settings import SandboxSettings
from graftwork.records.errors import EnvironmentLacks

WAYS = (
    SandboxKind.BUBBLEWRAP,
    SandboxKind.NAMESPACES,
    SandboxKind.USER_NAMESPACES,
    SandboxKind.LANDLOCK,
)
_TRIAL = "open('word', 'w').write('found'); print(open('word').read())"


@lru_cache(maxsize=1)
def available() -> SandboxKind:
    """The way that `run_python` takes."""
    said = []
    for kind in WAYS:
        lacking = why_not(kind)
        if not lacking:
            return kind
        said.append(f"{kind}: {lacking}")
    raise EnvironmentLacks(
        "generated code cannot be shut in on this machine",
        why="; ".join(said),
        fix="install bubblewrap (apt install bubblewrap), allow user namespaces, or run as root; "
        "evaluate.sandbox.mode: off runs the code unprotected, at your own risk",
    )


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """The sandbox that graft.yaml asks for; EnvironmentLacks where it requires one and none can be had."""
    kind = SandboxKind.OFF if settings.mode == "off" else available()
    return Sandbox(kind, settings.limits, settings.packages)


@lru_cache(maxsize=8)
def why_not(kind: SandboxKind) -> str:
    """Empty where this way works: a program has been run in it and has been heard."""
    if sys.platform != "linux":
        return "needs Linux"
    if kind is SandboxKind.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    if kind in (SandboxKind.NAMESPACES, SandboxKind.LANDLOCK) and os.geteuid() != 0:
        return "needs root"
    task = {"action": "run", "name": "main.py", "source": _TRIAL, "files": {}}
    try:
        result = run_in_box(task, kind=kind, limits=Limits(), packages=(), asked=lambda _message: None)
    except BoxNotMade as error:
        return str(error)
    return (
        ""
        if result.ok and result.stdout == "found\n"
        else f"a trial ended with {result.reason}: {result.stderr}"
    )
