"""The plan of a streamed step counts the tensors that the engine makes, one by one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from distributed_child import FULL, make_rows
from followed_engine import follow

from graftwork.costmodel.allocations import CUBLAS_WORKSPACE
from graftwork.costmodel.plain_step import PlainRun
from graftwork.costmodel.streamed import StreamedWork, streamed_peak
from graftwork.model.adapters.peft import make_trainable
from graftwork.model.shape import shape_of, total_parameters
from graftwork.plan.catalog.hardware import default_rates
from graftwork.plan.fit import project as fit
from graftwork.records.plan import StreamedStep
from graftwork.train.settings import TrainSettings
from graftwork.train.streamed.engine import StreamedEngine

torch.set_num_threads(1)
ROWS, LENGTH, LAYERS = 8, 48, 4
SCALARS = 64 * 1024
"""Losses and norms: numbers of four bytes, each in a block of its own."""


def make_config(*, tied):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=1536,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )


def rows_of_a_length(count):
    tokens = tuple(range(3, 3 + LENGTH))
    return [row.model_copy(update={"tokens": tokens, "trained_from": 1}) for row in make_rows(count)]


def engine_of(config, step):
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    shape = FULL.model_copy(update={"layers": tuple(range(LAYERS))})
    learned = make_trainable(model, shape, seed=1)
    settings = TrainSettings(method="full", offload=True)
    return StreamedEngine(model, learned, settings=settings, step=step, device="cpu", overlapped=False)


@pytest.mark.parametrize(
    ("changed", "tied"),
    [
        ({"micro_rows": ROWS, "head_tokens": 64}, False),
        ({"micro_rows": 4, "head_tokens": 64}, True),
        ({"micro_rows": 4, "host_inputs": LAYERS}, False),
        ({"micro_rows": ROWS, "host_inputs": 2, "dtype": "float32"}, True),
    ],
)
def test_the_peak_of_a_streamed_step_is_what_its_tensors_take(changed, tied):
    given = {"dtype": "bfloat16", "limit_gib": 1, "peak_gib": 0, "host_gib": 0, **changed}
    step, config = StreamedStep(**given), make_config(tied=tied)
    followed = follow(lambda: engine_of(config, step), rows_of_a_length(ROWS)).peak.allocated
    shape = shape_of(config.to_dict(), name="tiny")
    run = PlainRun(shape, "llama", total_parameters(shape), step.dtype, default_rates(), fit.this_host())
    planned = streamed_peak(run, StreamedWork((LENGTH,), ROWS), step)
    assert planned.allocated - 2 * CUBLAS_WORKSPACE == pytest.approx(followed, abs=SCALARS)
    assert followed > 50 * SCALARS


@pytest.mark.parametrize(
    ("layers", "hidden", "inner", "heads", "rows", "allocated"),
    [(28, 3072, 8192, 24, 16, 11.99), (32, 4096, 11008, 32, 4, 12.65)],
)
def test_the_plan_of_a_card_is_what_an_h200_measured(layers, hidden, inner, heads, rows, allocated):
    """3B and 6.7B in 16 GiB, 16 rows of 2,048 tokens: benchmarks/results/train_full.json."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "vocab_size": 32256,
        "tie_word_embeddings": False,
    }
    shape = shape_of(config, name="card")
    here = fit.this_host()
    run = PlainRun(shape, "llama", total_parameters(shape), "bfloat16", default_rates(), here)
    step = StreamedStep(
        micro_rows=rows,
        dtype="bfloat16",
        head_tokens=2048,
        update="gpu",
        limit_gib=16,
        peak_gib=0,
        host_gib=0,
    )
    planned = streamed_peak(run, StreamedWork((2048,), 16), step)
    assert planned.allocated / 2**30 == pytest.approx(allocated, abs=0.01)
    assert 1.01 < planned.reserved / planned.allocated < 1.08
