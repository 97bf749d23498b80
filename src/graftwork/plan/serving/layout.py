"""How models and users are laid out over the places of a machine. Pure.

One base with its adapters is split over all cards. Whole models stand one beside the other, each on one card,
where one card holds one; so do their users.
"""

import math
from typing import NamedTuple

from graftwork.plan.serving.engines import CARD_SHARE, HOST_SHARE, Engine, find_engine
from graftwork.plan.serving.question import Form, ServeQuestion
from graftwork.plan.serving.weights import WeightBytes, weigh
from graftwork.records.units import GIB


class Layout(NamedTuple):
    """The fullest place: a card, or the machine's own memory."""

    split: int
    """Cards that one model is split over."""
    copies: int
    """Whole models on this place."""
    users: int
    """Users that this place answers."""


def lay_out(question: ServeQuestion) -> Layout:
    cards = max(question.cards, 1)
    if question.copies == 1 or cards == 1:
        return Layout(split=cards, copies=question.copies, users=question.users)
    copies = math.ceil(question.copies / cards)
    # Users are spread evenly over the models, so the fullest card has its share of them.
    users = math.ceil(question.users * copies / question.copies)
    return Layout(split=1, copies=copies, users=users)


def engine_of(question: ServeQuestion) -> Engine:
    return find_engine(question.engine, on_card=question.cards > 0)


def weights_of(question: ServeQuestion, form: Form) -> WeightBytes:
    return weigh(question.shape, form=form, engine=question.engine)


def available_bytes(question: ServeQuestion) -> float:
    """What serving may take of one place."""
    machine = question.machine
    memory = machine.ram_gib * HOST_SHARE if machine.gpu is None else machine.gpu.memory_gib * CARD_SHARE
    if question.memory_limit_gib is not None:
        # A limit is for all cards together.
        memory = min(memory, question.memory_limit_gib / max(question.cards, 1))
    return memory * GIB
