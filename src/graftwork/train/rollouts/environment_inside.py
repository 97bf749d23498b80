"""What runs in the sandbox: an environment is set up for a case and gets the replies of an episode so far.

Input: a JSON object with the environment, the case and the replies. Output: one line on standard output, with
what the environment answered to the last reply. Standard library only; the sandbox has nothing else.
"""

import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

NOT_TOOLS = ("reset", "step", "reward")
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}

BROKEN_CALL = "error: a call is not JSON with name and arguments"


def main(request_json: str) -> None:
    """Run the environment and print the result; its own output goes to standard error."""
    request = json.loads(request_json)
    output, sys.stdout = sys.stdout, sys.stderr
    player = _Command(request) if request.get("command") else _PythonClass(request)
    answer = player.open(request["case"])
    for reply in request["replies"]:
        answer = player.answer(reply)
        if answer.get("done"):
            break
    output.write(json.dumps(answer) + "\n")
    output.flush()


class _PythonClass:
    """An object with `step(text)`, or whose public methods are tools; `reset(case)` and `reward(text)` may
    be missing."""

    def __init__(self, request: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("environment", request["file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["environment"] = module
        spec.loader.exec_module(module)
        self._made: Any = getattr(module, request["name"])()

    def open(self, case: dict[str, Any]) -> dict[str, Any]:
        opening = self._made.reset(case) if hasattr(self._made, "reset") else None
        return {"text": opening or "", "tools": [describe_tool(*tool) for tool in self._tools().items()]}

    def answer(self, reply: dict[str, Any]) -> dict[str, Any]:
        if hasattr(self._made, "step"):
            outcome = self._made.step(reply["text"])
            observation = outcome if isinstance(outcome, dict) else {"text": outcome}
        elif reply["broken"]:
            observation = {"text": BROKEN_CALL}
        elif reply["calls"]:
            observation = {"text": "\n".join(self._call(call) for call in reply["calls"])}
        else:
            observation = {"text": "", "done": True}
        if observation.get("reward") is None and hasattr(self._made, "reward"):
            reward = self._made.reward
            takes_text = len(inspect.signature(reward).parameters) > 0
            observation = {**observation, "reward": reward(reply["text"]) if takes_text else reward()}
        return observation

    def _tools(self) -> dict[str, Callable[..., Any]]:
        if hasattr(self._made, "step"):
            return {}
        names = [name for name in dir(type(self._made)) if not name.startswith("_") and name not in NOT_TOOLS]
        members = {name: getattr(self._made, name) for name in names}
        return {name: member for name, member in members.items() if callable(member)}

    def _call(self, call: dict[str, Any]) -> str:
        """What a tool returns as text. A wrong call, or a ValueError of the tool, is an answer too."""
        tool, arguments = self._tools().get(call["name"]), call["arguments"]
        if tool is None:
            return f"error: there is no tool {call['name']}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not an object"
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return f"error: {error}"
        try:
            outcome = tool(**arguments)
        except ValueError as error:
            return f"error: {error}"
        return outcome if isinstance(outcome, str) else json.dumps(outcome)


def describe_tool(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """The tool as chat templates take it."""
    parameters = inspect.signature(tool).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    properties = {
        parameter.name: {"type": TYPES.get(parameter.annotation, "string")} for parameter in parameters
    }
    schema = {"type": "object", "properties": properties, "required": required}
    text = inspect.cleandoc(tool.__doc__ or "")
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}


class _Command:
    """A program that gets a JSON line for the case and for each reply, and answers each with a JSON line."""

    def __init__(self, request: dict[str, Any]) -> None:
        command = [sys.executable if word == "python" else word for word in request["command"]]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def open(self, case: dict[str, Any]) -> dict[str, Any]:
        return self._ask({"case": case})

    def answer(self, reply: dict[str, Any]) -> dict[str, Any]:
        return self._ask(reply)

    def _ask(self, value: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            sys.exit(f"the command ended with exit code {self._process.wait()}")
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the command ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            sys.exit("the command answered with something else than a JSON object")
        return answer
