"""Rows of random tokens, with or without a beginning that they share."""

import random

from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin


def make_rows(count=5, *, shared=0, longest=20, seed=4):
    chance = random.Random(seed)
    beginning = tuple(chance.randrange(3, 128) for _ in range(shared))
    rows = []
    for number in range(count):
        prompt = (
            *beginning,
            number + 3,
            *(chance.randrange(3, 128) for _ in range(chance.randrange(3, longest))),
        )
        reply = tuple(chance.randrange(3, 128) for _ in range(chance.randrange(1, 7)))
        rows.append(
            Row(
                id=str(number),
                origin=Origin(file="log.jsonl", line=number + 1),
                messages=(Message(role="user", content="x"),),
                reply="y",
                tokens=(*prompt, *reply),
                trained_from=len(prompt),
            )
        )
    return rows
