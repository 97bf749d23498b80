"""The most that a machine holds: users, context, specialists. Pure.

Each is a search over whole numbers for the last that fits, with memory as it is likely, and with its range:
the low end is what surely fits, the high end what might.
"""

from collections.abc import Callable

from graftwork.plan.serving.engines import CASES, Case, forms_of
from graftwork.plan.serving.layout import available_bytes, engine_of, weights_of
from graftwork.plan.serving.memory import adapter_bytes, held_bytes
from graftwork.plan.serving.question import Form, ServeQuestion, SpecialistRow
from graftwork.plan.serving.speed import time_answers
from graftwork.records.base import Figure
from graftwork.records.units import GIB

MOST_USERS = 4096
MOST_SPECIALISTS = 4096
CHECKED = 0.01


def most_users(question: ServeQuestion, form: Form) -> Figure:
    """Users whose full contexts are held at once."""
    return _by_case(
        lambda users, case: _fits(question.model_copy(update={"users": users}), form, case),
        most=MOST_USERS,
        unit="users",
    )


def most_users_in_time(question: ServeQuestion, form: Form) -> Figure | None:
    """Users who fit and are all answered within the limit; None where there is no limit."""
    limit = question.limit_seconds
    if limit is None:
        return None

    def good(users: int, case: int) -> bool:
        asked = question.model_copy(update={"users": users})
        answer = time_answers(asked, form).answer_seconds
        return _fits(asked, form, case) and _at(answer, case) <= limit

    return _by_case(good, most=MOST_USERS, unit="users")


def longest_context(question: ServeQuestion, form: Form) -> Figure:
    """Tokens that every user can have, no more than the model was made for."""
    return _by_case(
        lambda tokens, case: _fits(question.model_copy(update={"context": tokens}), form, case),
        most=question.shape.max_positions,
        unit="tokens",
    )


def list_specialists(question: ServeQuestion) -> tuple[SpecialistRow, ...]:
    """For every width of weights: how many whole models, and how many adapters on one base."""
    forms = forms_of(question.engine, on_card=question.cards > 0)
    return tuple(_specialists(question, form) for form in forms)


def _specialists(question: ServeQuestion, form: Form) -> SpecialistRow:
    asked = max(question.copies, question.adapters)
    whole = question.model_copy(update={"adapters": 0})
    shared = question.model_copy(update={"copies": 1})
    one = adapter_bytes(question, engine_of(question)) / GIB
    return SpecialistRow(
        form=form,
        one_model_gib=Figure.about(
            weights_of(question, form).held / GIB, down=1 - CHECKED, up=1 + CHECKED, unit="GiB"
        ),
        one_adapter_gib=Figure.exact(one, "GiB"),
        whole_models=_by_case(
            lambda copies, case: _fits(whole.model_copy(update={"copies": copies}), form, case),
            most=MOST_SPECIALISTS,
            unit="models",
        ),
        adapters=_by_case(
            lambda adapters, case: _fits(shared.model_copy(update={"adapters": adapters}), form, case),
            most=MOST_SPECIALISTS,
            unit="adapters",
        ),
        asked=asked,
        asked_whole_gib=_total(whole.model_copy(update={"copies": asked}), form),
        asked_adapters_gib=_total(shared.model_copy(update={"adapters": asked}), form),
    )


def _total(question: ServeQuestion, form: Form) -> Figure:
    """Over all places together: every model counted where it stands."""
    # As if one place held all: what is split is whole again, what is spread is side by side.
    together = question.machine.model_copy(update={"gpus": min(question.cards, 1)})
    asked = question.model_copy(update={"machine": together})
    low, value, high = (sum(held_bytes(asked, form, case=case)) / GIB for case in CASES)
    return Figure(value=value, low=low, high=high, unit="GiB")


def _fits(question: ServeQuestion, form: Form, case: int) -> bool:
    return sum(held_bytes(question, form, case=case)) <= available_bytes(question)


def _at(figure: Figure, case: int) -> float:
    return (figure.low, figure.value, figure.high)[case]


def _by_case(good: Callable[[int, int], bool], *, most: int, unit: str) -> Figure:
    found = [_last_good(good, case=case, most=most) for case in CASES]
    return Figure(value=found[Case.LIKELY], low=min(found), high=max(found), unit=unit)


def _last_good(good: Callable[[int, int], bool], *, case: int, most: int) -> int:
    """The largest number up to `most` that is good, where more is never better; 0 where 1 is not."""
    if good(most, case):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle, case) else (low, middle)
    return low
