"""Plans as forms: does it fit, can it be served, where to run it, what to buy. Each shows its command.

The form is in the address: the same address gives the same answer. Nothing is started.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import plans
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError
from graftwork.views import view
from graftwork.web.rendering import project_of, render, text_in

SECTION = "/plan"


class PlanField(NamedTuple):
    """A field of a form. `known` names the list that suggests values; `read` turns its text into a value."""

    name: str
    label: str
    read: Callable[[str], Any] = str
    hint: str = ""
    known: str = ""
    choices: tuple[str, ...] = ()
    option: str = ""
    """The option of the command, if it has another name."""
    zero: bool = False
    """Whether 0 is a valid value."""

    @property
    def flag(self) -> str:
        return f"--{(self.option or self.name).replace('_', '-')}"


def _lines(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


MODEL = PlanField("model", "Model", hint="a name in the catalog; empty: the project's base", known="models")
RUN = (
    PlanField("method", "Method", choices=("", "qlora", "lora", "dora", "full")),
    PlanField("seq", "Tokens per row", hint="2048, or data"),
    PlanField("rows", "Rows per epoch", int),
    PlanField("epochs", "Epochs", float),
    PlanField("rank", "Rank", int),
)
FIT = (
    MODEL,
    PlanField("gpu", "GPU", hint="empty: this machine", known="gpus"),
    PlanField("gpus", "Number of GPUs", int),
    PlanField("ram", "Host memory, GiB", float),
    *RUN,
    PlanField("batch", "Rows per step", int),
)
SERVE = (
    PlanField("model", "Model", hint="a name in the catalog", known="models"),
    PlanField("gpu", "GPU", hint="empty: this machine", known="gpus"),
    PlanField("cpu", "CPU", hint="serve without a GPU", known="cpus"),
    PlanField("ram", "Host memory, GiB", float),
    PlanField("users", "Concurrent users", int),
    PlanField("context", "Context tokens", int),
    PlanField("answer", "Answer tokens", int),
    PlanField("adapters", "Adapters on one base", int, zero=True),
    PlanField("limit_seconds", "Latency limit, seconds", float, option="limit"),
)
COMPARE = (
    MODEL,
    *RUN,
    PlanField("budget", "Budget, USD", float, zero=True),
    PlanField("deadline", "Deadline, hours", float),
    PlanField("goal", "Sort by", choices=("cost", "time")),
    PlanField("own", "GPUs that you own", _lines, hint="2x RTX 5060 Ti 16GB"),
)
BUY = (
    PlanField("have", "What you have", hint="RTX 5060 Ti 16GB", known="gpus"),
    PlanField("option", "What you consider", _lines, hint="2x RTX 5060 Ti 16GB=700; RTX 5090=2000"),
    MODEL,
    *RUN,
    PlanField("runs_per_week", "Runs per week", float),
    PlanField("years", "Years of use", float),
    PlanField("electricity", "USD per kWh", float, zero=True),
)


class PlanForm(NamedTuple):
    title: str
    question: str
    fields: Sequence[PlanField]
    answer: Callable[..., Record]
    needed: str = ""
    """The field without which the form is not submitted."""
    in_project: bool = False
    """Whether the project supplies values that are not stated."""


FORMS: dict[str, PlanForm] = {
    "fit": PlanForm(
        "Fit", "Does a training run fit, and how long does it take?", FIT, plans.plan_fit, in_project=True
    ),
    "serve": PlanForm("Serve", "Can a model be served on this machine, how fast, for how many?", SERVE,
                      plans.plan_serve, needed="model"),
    "compare": PlanForm("Compare", "Where should the run take place, and what does it cost?", COMPARE,
                        plans.plan_compare, in_project=True),
    "buy": PlanForm("Buy", "Keep what you have, buy, or rent?", BUY, plans.plan_buy, needed="have",
                    in_project=True),
}  # fmt: skip


def index(request: Request) -> Response:
    """The plan of the project's own run, and the forms."""
    project = project_of(request)
    with project.open() as work:
        entry = work.ledger.get("plan")
    return render(
        request,
        "plan.html.jinja",
        title="Plan",
        section=SECTION,
        forms=FORMS,
        plan=_read_plan(entry.output) if entry else None,
        finished_at=entry.finished_at if entry else None,
    )


def _read_plan(output: Mapping[str, Any]) -> object:
    from graftwork.records.plan import Plan

    try:
        return Plan.model_validate(output)
    except ValueError:
        return None


def form(request: Request) -> Response:
    name = request.path_params["form"]
    chosen = FORMS.get(name)
    if chosen is None:
        raise UserError(f"there is no form {name!r}", fix=f"choose one of {', '.join(FORMS)}")
    values = {field.name: text_in(request, field.name) for field in chosen.fields}
    asked = bool(request.query_params) and (not chosen.needed or bool(values[chosen.needed]))
    needed = next((field.label for field in chosen.fields if field.name == chosen.needed), "")
    answer, error = (None, None) if not asked else _answer(request, chosen, values)
    return render(
        request,
        "plan_form.html.jinja",
        title=chosen.title,
        section=SECTION,
        name=name,
        form=chosen,
        forms=FORMS,
        values=values,
        known=plans.list_known_hardware(),
        command=write_command(name, chosen, values),
        viewed=view(answer) if answer is not None else None,
        error=error,
        missing=needed if request.query_params and not asked else "",
    )


def _answer(
    request: Request, chosen: PlanForm, values: Mapping[str, str]
) -> tuple[Record | None, GraftError | None]:
    try:
        options = {
            field.name: _read(field, values[field.name]) for field in chosen.fields if values[field.name]
        }
        if chosen.in_project:
            options["project"] = project_of(request).root
        return chosen.answer(**options), None
    except GraftError as error:
        return None, error
    except (ValueError, OverflowError) as error:
        # A ValidationError is a ValueError.
        return None, UserError(
            "no plan is possible with these values", why=str(error)[:400], fix="enter other values"
        )


def _read(field: PlanField, text: str) -> Any:
    try:
        value = field.read(text)
        usable = not isinstance(value, int | float) or (
            math.isfinite(value) and (value > 0 or (field.zero and value == 0))
        )
    except (ValueError, OverflowError):
        usable = False
    if not usable:
        wanted = "0 or a number above 0" if field.zero else "a number above 0"
        raise UserError(
            f"{field.label} is {text!r}",
            why=f"it must be {wanted}",
            fix=f"enter {wanted}",
            where=field.flag,
        )
    return value


def write_command(name: str, chosen: PlanForm, values: Mapping[str, str]) -> str:
    """The same question on the command line."""
    parts = ["graft", "plan", name]
    for field in chosen.fields:
        text = values.get(field.name, "")
        for value in _lines(text) if field.read is _lines else ([text] if text else []):
            parts += [field.flag, value]
    return shlex.join(parts)


ROUTES = [Route("/plan", index), Route("/plan/{form}", form)]
