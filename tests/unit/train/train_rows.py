"""Rows, an adapter's shape and settings for quick tests of a step."""

import random

from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.records.dataset import Row
from graftwork.train.settings import TrainSettings

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
SETTINGS = TrainSettings(rank=4, alpha=8, batch_size=8, max_grad_norm=1e6, threads=1)


def make_rows(count: int) -> list[Row]:
    chance = random.Random(1)
    rows = []
    for number in range(count):
        prompt = [chance.randrange(100, 400) for _ in range(chance.randrange(5, 12))]
        reply = [7, 8, 9, 10 + number % 3, 2][: 2 + number % 4]
        rows.append(make_row(str(number), (*prompt, *reply), len(prompt)))
    return rows
