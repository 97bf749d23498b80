"""Chains of models, in which one's answer is another's input: the `serve.chains` section of graft.yaml."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
QUESTION, CONVERSATION, ANSWER = "question", "conversation", "answer"
GIVEN = (QUESTION, CONVERSATION, ANSWER)
"""Placeholders that name no step: the user's last turn, the whole conversation, the last answer so far."""
StepName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Template = Annotated[str, NotSecret("a prompt that the project declares")]


class ChainCondition(Record):
    """When a step runs, by an earlier answer. Every condition that is set must hold."""

    answer_of: StepName | None = Field(
        default=None, description="The step whose answer is looked at. None: the last answer so far."
    )

    contains: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains one of these texts, in any case."
    )

    lacks: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains none of these texts, in any case."
    )

    fails: tuple[str, ...] = Field(
        default=(),
        description="The answer fails one of these metrics or checks of `evaluate`; those that compare with "
        "a reference are refused.",
    )

    @model_validator(mode="after")
    def _is_a_condition(self) -> Self:
        if not (self.contains or self.lacks or self.fails):
            raise ValueError("the condition holds always: give it contains, lacks or fails, or leave it out")
        if any(not text for text in (*self.contains, *self.lacks)):
            raise ValueError("an empty text is contained in every answer")
        return self


class ChainStep(Record):
    """One model that is asked."""

    name: StepName = Field(description="Prompts of later steps use the answer as `{{name}}`.")

    model: str = Field(
        min_length=1,
        description="An alias, `base`, a release, the family, a name under `serve.failover.endpoints`, or "
        "another chain.",
    )

    prompt: Template | None = Field(
        default=None,
        min_length=1,
        description="What the model is asked, with `{{question}}`, `{{conversation}}`, `{{answer}}` (the "
        "last one so far) and answers of earlier steps by their names. None: the conversation as received.",
    )

    system: Template | None = Field(
        default=None, description="The system prompt of this step. None: that of the request."
    )

    when: ChainCondition | None = Field(
        default=None,
        description="Without it the step always runs. A step that does not run has the answer before it as "
        "its own.",
    )

    fallback: str | None = Field(
        default=None, min_length=1, description="The model that is asked if this one fails."
    )

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The longest answer of this step. None: as the request says.",
    )


class ChainSettings(Record):
    """Steps in their order; the answer of the last one that runs is sent."""

    steps: tuple[ChainStep, ...] = Field(min_length=1, description="Asked one after the other.")

    max_steps: int = Field(
        default=8, ge=1, le=64, description="Steps at most, those of chains within this one included."
    )

    max_seconds: float = Field(default=60.0, gt=0, description="How long all steps may take together.")

    max_tokens: int = Field(
        default=8192, ge=1, description="Tokens of all prompts and answers of one request together."
    )

    fallback: str | None = Field(
        default=None,
        min_length=1,
        description="The model that answers the request instead if a step fails or the tokens are used up. "
        "None: the request fails with the name of the step.",
    )

    @model_validator(mode="after")
    def _steps_are_sound(self) -> Self:
        before: list[str] = []
        for step in self.steps:
            if step.name in before:
                raise ValueError(f"two steps are called {step.name}")
            if step.name in GIVEN:
                raise ValueError(f"{step.name} is a placeholder of its own: give the step another name")
            if not before and step.when is not None:
                raise ValueError(
                    f"the first step, {step.name}, has no answer before it that `when` could test"
                )
            if step.when is not None and step.when.answer_of not in (None, *before):
                raise ValueError(f"{step.name} looks at {step.when.answer_of}, which is no step before it")
            known = (QUESTION, CONVERSATION, *((ANSWER,) if before else ()), *before)
            for name in find_placeholders(step):
                if name not in known:
                    shown = ", ".join(known)
                    raise ValueError(
                        f"the prompt of {step.name} uses {{{{{name}}}}}, which is not known there: {shown}"
                    )
            before.append(step.name)
        return self


def find_placeholders(step: ChainStep) -> Iterator[str]:
    for text in (step.prompt, step.system):
        yield from PLACEHOLDER.findall(text or "")


def require_sound_chains(chains: Mapping[str, ChainSettings]) -> None:
    """Refuse chains that lead back to themselves, or have more steps than they allow. Raises ValueError."""
    for name, chain in chains.items():
        _require_no_cycle(chains, name, ())
        for fallback in (chain.fallback, *(step.fallback for step in chain.steps)):
            if fallback in chains:
                raise ValueError(f"the fallback {fallback} of the chain {name} is a chain: name a model")
    for name, chain in chains.items():
        steps = count_steps(chains, name)
        if steps > chain.max_steps:
            raise ValueError(
                f"the chain {name} may take {steps} steps with those of the chains in it; raise its "
                f"max_steps ({chain.max_steps})"
            )


def count_steps(chains: Mapping[str, ChainSettings], name: str) -> int:
    """Models that one request may ask at most, fallbacks not counted."""
    return sum(count_steps(chains, step.model) if step.model in chains else 1 for step in chains[name].steps)


def _require_no_cycle(chains: Mapping[str, ChainSettings], name: str, path: tuple[str, ...]) -> None:
    if name in path:
        cycle = " → ".join((*path[path.index(name) :], name))
        raise ValueError(f"the chain {name} leads back to itself: {cycle}")
    for step in chains[name].steps:
        if step.model in chains:
            _require_no_cycle(chains, step.model, (*path, name))
