"""Rows, settings and an engine for the tests of training."""

import random

import torch
from sample_rows import make_row

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import load_base
from graftwork.train.engine import TrainingEngine
from graftwork.train.settings import TrainSettings

SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1))
SETTINGS = TrainSettings(
    rank=4, alpha=8, epochs=2, batch_size=4, learning_rate=5e-2, checkpoint_every=3, threads=1
)


def make_rows(count=16):
    chance = random.Random(1)
    rows = []
    for number in range(count):
        prompt = [chance.randrange(100, 400) for _ in range(chance.randrange(5, 12))]
        reply = [7, 8, 9, 10 + number % 3, 2]
        rows.append(make_row(str(number), (*prompt, *reply), len(prompt)))
    return rows


def make_engine(base, settings=SETTINGS, **more):
    torch.set_num_threads(1)
    model = load_base(base)
    return TrainingEngine(model, attach(model, SHAPE, seed=settings.seed), settings=settings, **more)
