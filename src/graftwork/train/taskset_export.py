"""Exports prompts and rewards of a project as a task set of verifiers v1: a package that `vf-eval` can run.

Input: an open project, a folder, a name. Output: the package, with copies of the reward files. Graftwork
grades there too, so the package depends on graftwork (without torch) and on verifiers.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from graftwork.files.disk import atomic_folder
from graftwork.grading.checks import GradeCheck
from graftwork.grading.custom import find_files, find_own, is_own
from graftwork.grading.rewards import RewardSpec, function_of
from graftwork.pipeline.preflight import project_prompts, require_listed
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.run import ENVIRONMENT, TASKSET
from graftwork.train.rollouts.project import make_reward_spec
from graftwork.version import __version__

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class ExportedTaskset(Record):
    """An exported task set: where it was written, and its content."""

    folder: str
    name: str
    package: str
    tasks: int
    rewards: tuple[str, ...]
    files: tuple[str, ...]
    """Files of the project that were copied."""


def export_taskset(
    work: OpenProject, folder: Path, *, name: str | None = None, cases: Path | None = None
) -> ExportedTaskset:
    """Write the package to `folder`, which must not exist."""
    settings = work.settings
    dashed = require_name(name or settings.project)
    package = dashed.replace("-", "_")
    require_listed(work)
    prompts = project_prompts(work, cases=cases)
    spec = make_reward_spec(work)
    require_exportable(spec)
    if folder.exists():
        raise UserError(
            f"{folder} already exists",
            why="nothing is overwritten",
            fix="use another folder with --out, or remove it",
            where=str(folder),
        )
    files = own_files(spec, settings.evaluate.checks, root=work.project.root)
    with atomic_folder(folder) as part:
        inner = part / package
        for relative, path in files.items():
            copy = inner / "project" / relative
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        texts = {
            part / "pyproject.toml": _pyproject(dashed, package),
            part / "README.md": _readme(dashed, package, project=settings.project, tasks=len(prompts)),
            inner / "__init__.py": _INIT.format(package=package),
            inner / "taskset.py": _TASKSET.format(name=dashed, project=settings.project),
            inner / "rewards.json": spec.to_json() + "\n",
            inner / "tasks.jsonl": "".join(f"{case.model_dump_json()}\n" for case in prompts),
        }
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return ExportedTaskset(
        folder=str(folder),
        name=dashed,
        package=package,
        tasks=len(prompts),
        rewards=tuple(reward.metric for reward in spec.parts),
        files=tuple(sorted(files)),
    )


def require_name(name: str) -> str:
    """The name with dashes, as `vf-eval` expects."""
    lowered = name.strip().lower().replace(" ", "-")
    if not _NAME.fullmatch(lowered):
        raise UserError(
            f"{name} is not a name for a package",
            why="it starts with a letter and has letters, digits and single dashes",
            fix="give another one with --name",
        )
    return lowered.replace("_", "-")


def require_exportable(spec: RewardSpec) -> None:
    """Rewards of one answer only: others need a group, an environment or another task set."""
    reasons = {
        ENVIRONMENT: "its episodes have several turns",
        TASKSET: "it is the reward of a task set already",
    }
    for part in spec.parts:
        why = "it compares the answers to one prompt" if part.ranks else reasons.get(part.metric)
        if why is not None:
            raise UserError(
                f"the reward {part.metric} cannot be exported",
                why=why,
                fix="remove it from `train.rewards` for the export",
                where="train.rewards",
            )


def own_files(spec: RewardSpec, checks: Sequence[GradeCheck], *, root: Path) -> dict[str, Path]:
    """The files of custom rewards and checks, and the files they use, by path in the project."""
    metrics = [function_of(part.metric) for part in spec.parts]
    metrics += [check.metric for check in checks]
    paths = [find_own(metric, folder=root) for metric in metrics if is_own(metric)]
    paths += [path for check in checks for path in find_files(check.files, folder=root)]
    return {path.relative_to(root.resolve()).as_posix(): path for path in paths}


def _pyproject(name: str, package: str) -> str:
    return f"""\
[project]
name = "{name}"
version = "0.1.0"
description = "Prompts and rewards of a graftwork project, as a task set of verifiers."
requires-python = ">=3.11"
dependencies = ["graftwork>={__version__.partition("+")[0]}", "verifiers>=0.4"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


def _readme(name: str, package: str, *, project: str, tasks: int) -> str:
    return f"""\
# {name}

{tasks} prompts and the rewards of the graftwork project {json.dumps(project)}, as a task set of verifiers v1.

```
pip install -e .
vf-validate {name} --runtime.type subprocess
vf-eval {name} -n 3
```

`{package}/tasks.jsonl` holds the prompts, `{package}/rewards.json` the rewards with their weights and gates,
and `{package}/project/` the files of reward functions. Graftwork grades answers in child processes; generated
code runs in its sandbox.
"""


_INIT = """\
from {package}.taskset import GraftTaskset

__all__ = ["GraftTaskset"]
"""

_TASKSET = '''\
"""{name}: prompts and rewards of the graftwork project {project}."""

import asyncio
from functools import cache
from pathlib import Path

import verifiers.v1 as vf
from graftwork.grading.rewards import AnswerVerdict, RewardQuestion, RewardRunner
from graftwork.grading.rewards import RewardSpec
from graftwork.records.report import Case

HERE = Path(__file__).parent


@cache
def open_rewards() -> RewardRunner:
    spec = RewardSpec.from_json((HERE / "rewards.json").read_text())
    return RewardRunner(spec.model_copy(update={{"folder": str(HERE / "project")}}), processes=2)


class GraftData(vf.TaskData):
    case: dict
    """The prompt with its reference and checks, as graftwork keeps it."""


class GraftTask(vf.Task[GraftData]):
    async def grade(self, text: str, truncated: bool = False) -> AnswerVerdict:
        question = RewardQuestion("0", Case.model_validate(self.data.case), text, truncated)
        return await asyncio.to_thread(lambda: next(open_rewards().grade_all([question])))

    @vf.metric
    async def parts(self, trace: vf.Trace) -> dict[str, float]:
        """The parts of the reward, each from 0 to 1."""
        graded = await self.grade(trace.last_reply, trace.is_truncated)
        trace.info["graftwork"] = {{"reward": graded.reward, "failed": graded.failed}}
        return {{name: value for name, value in graded.parts.items() if value is not None}}

    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        """Gates, then the weighted mean. Metrics run first: the answer is graded once."""
        graded = trace.info["graftwork"]
        if graded["failed"]:
            raise RuntimeError("; ".join(f"{{name}}: {{why}}" for name, why in graded["failed"].items()))
        return graded["reward"] or 0.0

    async def validate(self, runtime: vf.Runtime) -> bool | None:
        """Whether the reference is rewarded; None without one."""
        reference = self.data.case["reference"]
        if not reference:
            return None
        return ((await self.grade(reference)).reward or 0.0) >= 0.5


class GraftTaskset(vf.Taskset[GraftTask, vf.TasksetConfig]):
    def load(self):
        for line in (HERE / "tasks.jsonl").read_text().splitlines():
            case = Case.from_json(line)
            prompt = [{{"role": message.role, "content": message.content}} for message in case.messages]
            data = GraftData(id=case.id, prompt=prompt, case=case.model_dump(mode="json"))
            yield GraftTask(data, self.config.task)
'''
