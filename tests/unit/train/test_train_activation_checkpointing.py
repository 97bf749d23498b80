"""Blocks that keep only their input give the same losses and gradients, and keep less."""

from types import SimpleNamespace

import pytest
import torch
from train_rows import SETTINGS, make_rows

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import make_trainable
from graftwork.model.load import load_base
from graftwork.model.parts import decoder_parts
from graftwork.records.plan import PlainStep
from graftwork.train.distributed.strategies import SingleProcess
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.engine_choice import make_engine as assemble_engine

TARGETS = ("q_proj", "v_proj", "down_proj")


def make_engine(base, kind="lora", *, four_bits=False, **more):
    torch.set_num_threads(1)
    model = load_base(base, four_bits=four_bits)
    shape = AdapterShape(kind=kind, rank=4, alpha=8, targets=TARGETS, layers=(0, 1))
    parameters = make_trainable(model, shape, seed=3)
    if kind != "full":
        with torch.no_grad():
            # Fresh adapters do nothing, and half of their gradient is zero: give them something to do.
            for parameter in parameters:
                parameter.add_(torch.full_like(parameter, 0.01))
    return TrainingEngine(model, parameters, settings=SETTINGS, **more)


def count_products(engine):
    """How often the first block's MLP is called in one step."""
    calls = []
    # Before it and not behind: the second time is over when the last tensor that is needed is there.
    hook = decoder_parts(engine.model).blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.backward(make_rows(4))
    hook.remove()
    return len(calls)


def kept_bytes(engine):
    """What the blocks leave for the backward pass next to their inputs, weights not counted."""
    sizes = {}
    weights = {p.data_ptr() for p in engine.model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder_parts(engine.model).decoder(input_ids=torch.arange(5, 45)[None], use_cache=False)
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("kind", "four_bits"), [("lora", False), ("lora", True), ("dora", False), ("full", False)]
)
@pytest.mark.parametrize("micro_rows", [None, 2])
def test_losses_and_gradients_are_the_same(tiny_base, kind, four_bits, micro_rows):
    rows = make_rows(5)
    plain, again = (
        make_engine(
            tiny_base,
            kind,
            four_bits=four_bits,
            step=StepOptions(micro_rows=micro_rows, activation_checkpointing=on),
        )
        for on in (False, True)
    )
    expected, found = plain.backward(rows), again.backward(rows)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
    for one, other in zip(plain.parameters, again.parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_block_is_computed_again_on_the_way_back_and_read_once_where_nothing_is_learned(tiny_base):
    plain, again = (
        make_engine(tiny_base),
        make_engine(tiny_base, step=StepOptions(activation_checkpointing=True)),
    )
    assert count_products(plain) == 1
    assert count_products(again) == 2
    with torch.no_grad():
        calls = []
        decoder_parts(again.model).blocks[0].mlp.register_forward_hook(lambda *_: calls.append(1))
        again.model(torch.tensor([[5, 6, 7]]))
    assert calls == [1]


def test_activation_checkpointing_stores_less(tiny_base):
    assert kept_bytes(
        make_engine(tiny_base, step=StepOptions(activation_checkpointing=True))
    ) < 0.2 * kept_bytes(make_engine(tiny_base))


def test_a_model_that_learns_this_way_still_answers_with_a_cache(tiny_base):
    plain, again = (
        make_engine(tiny_base),
        make_engine(tiny_base, step=StepOptions(activation_checkpointing=True)),
    )
    asked = torch.tensor([[5, 6, 7, 8]])
    texts = [
        engine.model.generate(asked, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
        for engine in (plain, again)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("asked", "planned", "expected"),
    [
        ("auto", None, False),
        ("auto", False, False),
        ("auto", True, True),
        ("on", None, True),
        ("off", True, False),
    ],
)
def test_the_plan_decides_unless_the_settings_do(tiny_base, tmp_path, asked, planned, expected):
    model = load_base(tiny_base)
    shape = AdapterShape(rank=4, alpha=8, targets=TARGETS, layers=(0, 1))
    learned = make_trainable(model, shape, seed=3)
    plain = None if planned is None else PlainStep(micro_rows=2, checkpointed=planned, peak_gib=1.0)
    plan = SimpleNamespace(
        tuning=None, plain=plain, streamed=None, train={}, dtype="float32", device=SimpleNamespace(kind="cpu")
    )
    job = SimpleNamespace(plan=plan, folder=str(tmp_path), base_folder=str(tiny_base))
    # Several processes train eagerly; a single one has the CPU step.
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": asked, "strategy": "ddp"})
    engine, _ = assemble_engine(
        job, settings, model, learned, make_rows(4), strategy=SingleProcess(), progress=lambda *_: None
    )
    passes = 2 if plain else 1
    assert count_products(engine) == passes * (2 if expected else 1)
