"""What a model is asked for: one component at one stage, with the cases that may be shown. Pure."""

import json

from graftwork.components.spec.cases import CallCase, Language, Stage, hidden_ids
from graftwork.components.spec.component import Component, ComponentPlan, python_type
from graftwork.components.verify.elixir import module_name
from graftwork.records.base import fingerprint
from graftwork.records.interaction import Message

SYSTEMS: dict[Language, str] = {
    "python": "You write one small, self-contained Python function for a specification. Answer with one "
    "fenced Python block and nothing else. The block defines exactly one public function, has no effect on "
    "import, and imports only what is allowed.",
    "elixir": "You write one small Elixir module for a specification. Answer with one fenced Elixir block "
    "and nothing else. The block defines exactly one module with one public function, and uses only what "
    "is allowed.",
}
STAGES: dict[Stage, str] = {
    1: "Stage 1, brute force: write the plainest correct function for these cases. No optimisation.",
    2: "Stage 2, extend: add what the new cases need. Everything that works now must work as before.",
    3: "Stage 3, optimise: give the same values with fewer executed lines or less memory.",
    4: "Stage 4, iterate: add handling of errors and edge cases only. Keep the rest as it is.",
}
MOST_SHOWN = 12


def write_prompt(
    plan: ComponentPlan, component: Component, stage: Stage, *, source: str = "", feedback: str = ""
) -> tuple[Message, ...]:
    """`source` is what was accepted at the stage before; `feedback` why the last attempt failed."""
    parts = [heading(component, stage), component.description]
    if plan.language == "python":
        parts.append(f"```python\n{component.signature}\n    ...\n```")
    else:
        head = f"{component.function}({', '.join(name for name, _ in component.parameters)})"
        module = module_name(plan, component)
        parts.append(f"```elixir\ndefmodule {module} do\n  def {head} do\n    ...\n```")
    if len(component.outputs) > 1:
        keys = ", ".join(f"{name}: {python_type(kind) or 'any'}" for name, kind in component.outputs)
        parts.append(f"It returns a dict with the keys {keys}.")
    if component.requirements:
        words = [text if " " in text else text.replace("_", " ") for text in component.requirements]
        parts.append("Requirements:\n" + "\n".join(f"- {text}" for text in words))
    parts.append(_imports(plan, component))
    shown = shown_calls(component, stage)
    if shown:
        parts.append("Cases:\n" + "\n".join(f"- {_call(component, call)}" for call in shown))
    parts.append(STAGES[stage])
    if source:
        parts.append(f"The function as it is now:\n```{plan.language}\n{source.strip()}\n```")
    if feedback:
        parts.append(f"The last attempt failed: {feedback}")
    user = "\n\n".join(part for part in parts if part)
    return (Message(role="system", content=SYSTEMS[plan.language]), Message(role="user", content=user))


def heading(component: Component, stage: Stage) -> str:
    return f"Component {component.id} · {component.function} · stage {stage}"


def shown_calls(component: Component, stage: Stage) -> list[CallCase]:
    hidden = hidden_ids(component.cases)
    return [call for call in component.cases.calls if call.stage <= stage and call.id not in hidden][
        :MOST_SHOWN
    ]


def prompt_hash(messages: tuple[Message, ...]) -> str:
    return fingerprint([message.model_dump() for message in messages])


def _call(component: Component, call: CallCase) -> str:
    given = [json.dumps(value, ensure_ascii=False) for value in call.args]
    given += [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.named.items()]
    asked = f"{component.function}({', '.join(given)})"
    if call.raises:
        return f"`{asked}` raises {call.raises}"
    return f"`{asked}` == `{json.dumps(call.gives, ensure_ascii=False)}`"


def _imports(plan: ComponentPlan, component: Component) -> str:
    lines = []
    if plan.language == "elixir":
        others = [plan.get(each) for each in component.dependencies]
        lines = [f"- `{module_name(plan, other)}.{other.function}`" for other in others]
        return "It may call:\n" + "\n".join(lines) if lines else ""
    for each in component.dependencies:
        other = plan.get(each)
        lines.append(
            f"- `from {plan.package}.{other.module} import {other.function}`: {other.signature[4:-1]}"
        )
    lines += [f"- `import {name}`" for name in component.cases.imports]
    return "It may import:\n" + "\n".join(lines) if lines else "It imports nothing."
