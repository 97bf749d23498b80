"""`serve`: a question about serving, answered. Pure.

In: a ServeQuestion, and the cards that may be named as a way out. Out: a ServeAnswer: one row for every width
of weights, one of them chosen, and how many users, tokens and specialists the machine holds.
"""

from graftwork.plan.serving.advice import advise, list_notes, list_sources
from graftwork.plan.serving.bounds import list_specialists, longest_context, most_users, most_users_in_time
from graftwork.plan.serving.engines import forms_of
from graftwork.plan.serving.layout import weights_of
from graftwork.plan.serving.memory import hold, in_words
from graftwork.plan.serving.question import Form, FormRow, ServeAnswer, ServeQuestion
from graftwork.plan.serving.speed import time_answers
from graftwork.plan.serving.weights import FORMATS
from graftwork.plan.serving.words import SLOW_SECONDS, say_verdict
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Gpu
from graftwork.records.units import GIB


def serve(question: ServeQuestion, *, cards: tuple[Gpu, ...] = ()) -> ServeAnswer:
    """Say what serving will be like. `cards` are looked through where this machine does not do."""
    rows = ask_every_form(question)
    row = _choose(question, rows)
    rows = tuple(one.model_copy(update={"chosen": one is row}) for one in rows)
    meets = None if row.meets_limit is None else row.meets_limit in ("yes", "likely")
    latency = row.latency
    return ServeAnswer(
        verdict=say_verdict(question, row),
        good=row.fits and meets is not False,
        fits=row.fits,
        meets_limit=meets,
        question=question,
        weights=row.form,
        memory_gib=row.holding.memory_gib,
        available_gib=row.holding.available_gib,
        spare_gib=row.holding.spare_gib,
        parts_gib=row.holding.parts_gib,
        first_token_alone_seconds=latency.first_token_alone_seconds,
        first_token_seconds=latency.first_token_seconds,
        token_seconds=latency.token_seconds,
        answer_seconds=latency.answer_seconds,
        tokens_per_second=latency.tokens_per_second,
        parts_seconds=latency.parts_seconds,
        most_users=most_users(question, row.form),
        most_users_in_time=most_users_in_time(question, row.form),
        longest_context=longest_context(question, row.form),
        quantisations=rows,
        specialists=list_specialists(question),
        advice=advise(question, row, rows=rows, cards=cards, ask=ask_every_form),
        notes=list_notes(question, row),
        sources=list_sources(question.machine),
    )


def ask_every_form(question: ServeQuestion) -> tuple[FormRow, ...]:
    """The question with every width of weights that the engine serves, the widest first."""
    return tuple(_row(question, form) for form in forms_of(question.engine, on_card=question.cards > 0))


def _row(question: ServeQuestion, form: Form) -> FormRow:
    weights, holding, latency = weights_of(question, form), hold(question, form), time_answers(question, form)
    limit = question.limit_seconds
    return FormRow(
        form=form,
        format=FORMATS[question.engine, form],
        bits=Figure.exact(weights.bits(question.shape), "bits"),
        one_model_gib=Figure.about(weights.held / GIB, down=0.99, up=1.01, unit="GiB"),
        holding=holding,
        latency=latency,
        fits=holding.fits == "yes",
        meets_limit=None if limit is None else in_words(latency.answer_seconds, limit),
    )


def _choose(question: ServeQuestion, rows: tuple[FormRow, ...]) -> FormRow:
    """The one asked for; else the most bits that do, else the fastest that fits, else the smallest.

    Without a limit, what nobody would wait for does not do.
    """
    if question.form != "auto":
        for row in rows:
            if row.form == question.form:
                return row
        raise UserMistake(
            f"{question.engine} does not serve weights in {question.form} here",
            fix=f"name one of {', '.join(row.form for row in rows)}, or another engine",
            where="--weights",
        )
    good = [row for row in rows if row.fits and _is_in_time(row)]
    if good:
        return good[0]
    fitting = [row for row in rows if row.fits]
    if fitting:
        return min(fitting, key=lambda row: row.latency.answer_seconds.value)
    return rows[-1]


def _is_in_time(row: FormRow) -> bool:
    if row.meets_limit is None:
        return row.latency.answer_seconds.value < SLOW_SECONDS
    return row.meets_limit in ("yes", "likely")
