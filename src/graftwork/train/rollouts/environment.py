"""Environments of multi-turn episodes, in the sandbox.

In: cases and the replies of their episodes so far. Out: what the environment answers to each last reply, or
why it failed. Nothing of an environment lives between turns: every turn plays the episode again from its
beginning, so an environment must be deterministic, and a crash costs its own episode.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.process.sandbox import Sandbox, SandboxResult, SandboxSettings, open_sandbox
from graftwork.process.sandbox.run import BatchJob, Prelude, run_batch
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case
from graftwork.text.tool_calls import read_calls
from graftwork.train.objective_settings import EnvironmentSettings

PRELUDE = "episode"
MODULES = ("importlib.util", "inspect", "json", "subprocess")
MOST_TEXT = 20_000
"""Characters of one answer of an environment."""


class EnvironmentAnswer(NamedTuple):
    text: str = ""
    done: bool = False
    reward: float | None = None
    failed: str = ""
    """Why there is no answer: the environment crashed, took too long or answered nonsense."""


class Environment:
    """An environment of the project, as its settings name it."""

    def __init__(self, settings: EnvironmentSettings, *, folder: Path, sandbox: SandboxSettings) -> None:
        self._settings = settings
        self._folder = folder
        self._limits = sandbox.model_copy(update={"seconds": settings.seconds})
        self._sandbox: Sandbox | None = None

    def open(self, cases: Sequence[Case]) -> list[tuple[str, tuple[dict[str, Any], ...]]]:
        """What it says first, and its tools, for each case; UserMistake where it does not start."""
        found = []
        for case, result in zip(cases, self._run([(case, ()) for case in cases]), strict=True):
            why = describe_failure(result)
            given = {} if why else read_line(result)
            is_text = isinstance(given.get("text"), str | None)
            tools = given.get("tools")
            are_tools = isinstance(tools, list | None) and all(isinstance(tool, dict) for tool in tools or ())
            if why or not is_text or not are_tools:
                raise UserMistake(
                    f"the environment does not start for the case {case.id}",
                    why=why
                    or ("its first answer has no text" if not is_text else "its tools are no objects"),
                    fix="run its `reset` on this case by hand; only the standard library and "
                    "`evaluate.sandbox.packages` can be imported",
                    where="train.rollouts.environment",
                )
            cleaned = json.loads(clean_text(json.dumps(tools or [], ensure_ascii=False)))
            found.append((clean_text(given.get("text") or ""), tuple(cleaned)))
        return found

    def answer(self, episodes: Sequence[tuple[Case, Sequence[str]]]) -> list[EnvironmentAnswer]:
        """What the environment answers to the last reply of each episode."""
        return [read_answer(result) for result in self._run(episodes)]

    def _run(self, episodes: Sequence[tuple[Case, Sequence[str]]]) -> list[SandboxResult]:
        settings = self._settings
        file, _, name = (settings.python or "").partition(":")
        environment = {"command": list(settings.command), "file": file, "name": name}
        if self._sandbox is None:
            names = environment_files(settings)
            self._files = tuple((path, read_inner(self._folder, path)) for path in names)
            self._sandbox = open_sandbox(self._limits)
        jobs = []
        for case, replies in episodes:
            described = {
                "id": case.id,
                "messages": [message.model_dump() for message in case.messages],
                "reference": case.reference,
                "checks": list(case.checks),
            }
            spoken = []
            for text in replies:
                calls = read_calls(text)
                # `broken`: one of the calls cannot be read.
                listed = [call._asdict() for call in calls or ()]
                spoken.append({"text": text, "calls": listed, "broken": calls is None})
            given = json.dumps({**environment, "case": described, "replies": spoken})
            jobs.append(BatchJob(f"import {PRELUDE}\n{PRELUDE}.main({given!r})\n", self._files))
        source = Path(__file__).with_name("environment_inside.py").read_text()
        return run_batch(jobs, sandbox=self._sandbox, prelude=Prelude(PRELUDE, source, MODULES))


def environment_files(settings: EnvironmentSettings) -> list[str]:
    """The files of the project that the environment gets in the sandbox."""
    named = [settings.python.partition(":")[0]] if settings.python else []
    return [*named, *settings.files]


def read_inner(folder: Path, name: str) -> str:
    """The text of a file within the project's folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise UserMistake(
            f"the environment's file {name} is not in the project's folder",
            fix="name files relative to the folder of graft.yaml",
            where="train.rollouts.environment",
        )
    return path.read_text()


def describe_failure(result: SandboxResult) -> str:
    """Why a run in the sandbox gave no answer; empty if it gave one."""
    if result.ok and result.stdout.strip():
        return ""
    if result.reason in ("wall_clock", "cpu"):
        return "it took longer than `environment.seconds`"
    if result.reason == "output":
        return "it wrote more than the sandbox takes: answer with a shorter text"
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"it ended by {result.reason or 'itself'} without an answer")[:300]


def read_line(result: SandboxResult) -> dict[str, Any]:
    try:
        found = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def clean_text(text: str) -> str:
    """The text without characters that no prompt can hold: half characters, and the guard of the renderer."""
    from graftwork.model.chat.renderer import GUARD

    return text.encode("utf-8", "replace").decode().replace(GUARD, "\ufffd")


def read_answer(result: SandboxResult) -> EnvironmentAnswer:
    """The answer, checked: nothing that an environment returns can break a run."""
    if why := describe_failure(result):
        return EnvironmentAnswer(failed=why)
    given = read_line(result)
    text, done, reward = given.get("text"), given.get("done", False), given.get("reward")
    if text is not None and not isinstance(text, str):
        return EnvironmentAnswer(failed=f"it answered with {type(text).__name__} instead of text")
    if not isinstance(done, bool):
        return EnvironmentAnswer(failed="`done` is neither true nor false")
    is_number = isinstance(reward, bool | int | float) and 0 <= reward <= 1
    if reward is not None and not is_number:
        return EnvironmentAnswer(failed=f"its reward is {reward!r:.40} instead of a number from 0 to 1")
    return EnvironmentAnswer(
        clean_text((text or "")[:MOST_TEXT]), done, None if reward is None else float(reward)
    )
