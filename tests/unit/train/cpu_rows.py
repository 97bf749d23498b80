"""Rows of random tokens, with or without a beginning that they share."""

import random

from sample_rows import make_row


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
        rows.append(make_row(str(number), (*prompt, *reply), len(prompt)))
    return rows
