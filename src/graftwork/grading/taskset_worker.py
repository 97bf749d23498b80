"""The process that reads and grades a task set of verifiers v1, in an environment that has the package.

Input: a JSON object with the task set, then one object per line: `{"load": N}`, or a task and an answer.
Output: one line for each. Python runs this file by its path, so it imports the standard library and verifiers
only.
"""

from __future__ import annotations  # an old Python can then state that it is too old

import asyncio
import importlib.util
import inspect
import json
import math
import os
import queue
import sys
import threading
from typing import Any

LEAST_PYTHON = (3, 11)
LONGEST_MESSAGE = 300
INSTALL = "{python} -m pip install verifiers"


class TasksetRefused(Exception):
    """A task set that cannot be used here: what, why, how to fix it."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.message = {"what": what, "why": why, "fix": fix}


def open_taskset(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Open the task set; TasksetRefused if Python, verifiers or the package is missing."""
    if sys.version_info[:2] < LEAST_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        raise TasksetRefused(
            f"{sys.executable} is Python {version}, and verifiers needs 3.11 or newer",
            fix="set `rollouts.taskset.python` to a newer interpreter with verifiers",
        )
    for folder in reversed(spec["folders"]):
        sys.path.insert(0, folder)
    if importlib.util.find_spec("verifiers") is None:
        raise TasksetRefused(
            f"the package verifiers is not installed for {sys.executable}",
            why="task sets run in a separate environment",
            fix=f"run `{INSTALL.format(python=sys.executable)}`, or set `rollouts.taskset.python`",
        )
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise TasksetRefused(
            f"verifiers cannot be imported by {sys.executable}: {shorten(error)}",
            why="task sets of version 1 need verifiers 0.3 or newer with its dependencies",
            fix=f"run `{INSTALL.format(python=sys.executable)} --upgrade`",
        ) from error
    try:
        from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

        kind = taskset_class(spec["name"])
        config = taskset_config_type(spec["name"]).model_validate({**spec["options"], "id": spec["name"]})
        taskset = kind(config)
    except ModuleNotFoundError as error:
        raise TasksetRefused(
            f"there is no task set {spec['name']} for {sys.executable}",
            why=shorten(error),
            fix="install its package there, or set `rollouts.taskset.folder` to the folder that holds it",
        ) from error
    except Exception as error:
        raise TasksetRefused(
            f"the task set {spec['name']} cannot be opened: {type(error).__name__}",
            why=shorten(error),
            fix="check `rollouts.taskset.options` against the settings of the task set",
        ) from error
    require_single_reply(vf, taskset)
    return vf, taskset


def require_single_reply(vf: Any, taskset: Any) -> None:
    """Refuse what needs more than one reply of one model, or commands outside of our sandbox."""
    name, task = taskset.config.id, type(taskset).task_type()
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils.loaders import environment_class

    fix = "use a task set of single replies, or write the task as `rollouts.environment`"
    if environment_class(name) is not SingleAgentEnv:
        raise TasksetRefused(f"the task set {name} has an environment of several agents", fix=fix)
    if type(taskset).toolsets(taskset.config) or task.toolsets(taskset.config.task):
        raise TasksetRefused(f"the task set {name} has tools", why="its tasks take several turns", fix=fix)
    if task.NEEDS_CONTAINER:
        raise TasksetRefused(
            f"the task set {name} needs a container", why="answers are graded as text", fix=fix
        )
    probe = object.__new__(task)
    probe.config = taskset.config.task
    hooks = [*probe.hooks("reward"), *probe.hooks("metric")]
    if not probe.hooks("reward") and not probe.config.judges:
        raise TasksetRefused(f"the task set {name} has no rewards", fix="write a method with `@vf.reward`")
    hooks += [
        getattr(probe, hook)
        for hook in ("setup", "finalize")
        if getattr(task, hook) is not getattr(vf.Task, hook)
    ]
    needy = [hook.__name__ for hook in hooks if needs_runtime(hook)]
    if needy:
        raise TasksetRefused(
            f"{', '.join(needy)} of the task set {name} run commands in a runtime",
            why="answers never run outside of the sandbox, and no runtime of verifiers is given",
            fix=fix,
        )


def needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def load_tasks(taskset: Any, count: int) -> list[dict[str, Any]]:
    """The first tasks: prompt, identity, data. A task without a prompt of text is refused by name."""
    tasks = []
    for task in taskset.take(count):
        data = task.data.model_dump(mode="json")
        tasks.append(
            {
                "id": task.data.id or task.data.name,
                "key": task.hash,
                "messages": read_prompt(task),
                "data": data,
            }
        )
    if not tasks:
        raise TasksetRefused("the task set has no tasks", fix="check `rollouts.taskset.options`")
    return tasks


def read_prompt(task: Any) -> list[dict[str, str]]:
    data = task.data
    if data.prompt is None:
        raise TasksetRefused(
            f"task {data.idx} has no prompt",
            why="its user opens the conversation",
            fix="use another task set",
        )
    if data.image is not None:
        raise TasksetRefused(
            f"task {data.idx} needs the image {data.image}", fix="use a task set without containers"
        )
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    for message in data.prompt:
        if not isinstance(message.content, str):
            raise TasksetRefused(
                f"task {data.idx} has a prompt that is not text", fix="use a task set of text"
            )
        messages.append({"role": message.role, "content": message.content})
    return messages


def make_trace(vf: Any, task: Any, answer: dict[str, Any]) -> Any:
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import ModelCall, TraceTask

    trace = vf.Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig(), name="graftwork"),
    )
    messages = [*read_prompt(task), {"role": "assistant", "content": answer["text"]}]
    for index, message in enumerate(messages):
        node = {
            "parent": index - 1 if index else None,
            "message": message,
            "sampled": index == len(messages) - 1,
        }
        trace.nodes.append(vf.MessageNode.model_validate(node))
    reason = "length" if answer.get("truncated") else "stop"
    trace.calls.append(ModelCall(node=len(messages) - 1, finish_reason=reason))
    trace.is_completed = trace.ok = True
    trace.stop_condition = "agent_completed"
    return trace


async def score(vf: Any, taskset: Any, answer: dict[str, Any]) -> Any:
    from verifiers.v1.utils.decorators import invoke

    kind = type(taskset).task_type()
    task = kind(kind.data_type().model_validate(answer["task"]), taskset.config.task)
    trace = make_trace(vf, task, answer)
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(vf.Task, hook):
            await invoke(getattr(task, hook), {"trace": trace})
    await task.score(trace)
    return trace


def grade(vf: Any, taskset: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """The weighted sum of the rewards, and each of them by name; why there is none."""
    try:
        trace = asyncio.run(score(vf, taskset, answer))
    except (Exception, SystemExit) as error:
        return {"failed": shorten(error)}
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        return {"failed": f"{', '.join(missing) or 'the task'} gave no reward"}
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    for name, value in scores.items():
        if not math.isfinite(value):
            return {"failed": f"{name} returned {value} instead of a number"}
    metrics = {
        name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)
    }
    return {"grade": trace.reward, "scores": {**metrics, **scores}}


def shorten(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 1] + "…"


def read_lines() -> queue.Queue[str]:
    """Read lines of standard input in a thread: when the parent is gone, a hanging reward ends too."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> int:
    # Replies have a descriptor of their own: what a task set prints goes to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines = read_lines()
    try:
        vf, taskset = open_taskset(json.loads(lines.get()))
    except TasksetRefused as error:
        replies.write(json.dumps({"refused": error.message}) + "\n")
        return 1
    replies.write(json.dumps({"ready": True}) + "\n")
    while True:
        request = json.loads(lines.get())
        if "load" not in request:
            reply = grade(vf, taskset, request)
        else:
            try:
                reply = {"tasks": load_tasks(taskset, request["load"])}
            except TasksetRefused as error:
                reply = {"refused": error.message}
            except (Exception, SystemExit) as error:
                why = f"{type(error).__name__}: {shorten(error)}"
                reply = {"refused": {"what": "the task set cannot be loaded", "why": why, "fix": ""}}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    sys.exit(main())
