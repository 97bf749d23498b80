"""Releases that are a prompt on the base instead of weights, on the engine's side.

In: the releases of a job and those that follow. Out: the ones with weights, which the engine loads, and
requests to the base with the prompt before the messages. Any engine serves prompts that way.
"""

from pathlib import Path
from typing import Any

from graftwork.records.release import PROMPT_FILE, PromptVariant
from graftwork.serve.engine_protocol import BASE, EngineJob, GenerateRequest

_SYSTEM = ("system", "developer")


class PromptReleases:
    def __init__(self) -> None:
        self._prompts: dict[str, PromptVariant] = {}

    @property
    def names(self) -> list[str]:
        return list(self._prompts)

    def split(self, job: EngineJob) -> EngineJob:
        """Take the prompts of the job; returns the job with what has weights."""
        weights = {name: folder for name, folder in job.adapters.items() if not self.take(name, folder)}
        return job.model_copy(update={"adapters": weights})

    def take(self, name: str, folder: str) -> bool:
        """Whether the release is a prompt; if so, it is kept for its requests."""
        file = Path(folder) / PROMPT_FILE
        if not file.is_file():
            return False
        self._prompts[name] = PromptVariant.from_json(file.read_bytes())
        return True

    def apply(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the base answers it. Texts to continue and to embed have no place for a prompt."""
        prompt = self._prompts.get(request.model)
        if prompt is None:
            return request
        update: dict[str, Any] = {"model": BASE}
        if request.prompt is None and request.embed is None:
            update["messages"] = prompt.apply(request.messages)
            if request.chat is not None:
                update["chat"] = {**request.chat, "messages": _put_before(prompt, request.chat["messages"])}
        return request.model_copy(update=update)


def _put_before(prompt: PromptVariant, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a client sent them, with the prompt; tools are no part of these."""
    if prompt.instruction is not None:
        messages = [turn for turn in messages if turn["role"] not in _SYSTEM]
        if prompt.instruction:
            messages = [{"role": "system", "content": prompt.instruction}, *messages]
    opening = next((i for i, turn in enumerate(messages) if turn["role"] not in _SYSTEM), len(messages))
    examples = [{"role": turn.role, "content": turn.content} for turn in prompt.examples]
    return [*messages[:opening], *examples, *messages[opening:]]
