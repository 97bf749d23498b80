"""The streaming engine computes what the plain one does, holds what it counts, and survives a kill."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from distributed_child import FULL, make_rows

from graftwork.costmodel.streamed import held_tensors
from graftwork.model.adapters.peft import make_trainable
from graftwork.model.load import load_base
from graftwork.model.shape import read_shape
from graftwork.records.plan import StreamedStep
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.settings import TrainSettings
from graftwork.train.streamed.engine import StreamedEngine

torch.set_num_threads(1)
STEPS = ((0, 1, 2, 3, 4), (5, 6, 7), (8, 9, 10, 11))
SETTINGS = TrainSettings(method="full", weight_decay=0.01, max_grad_norm=0.5, offload=True)


def step(**changed):
    return StreamedStep(
        **{"micro_rows": 8, "dtype": "float32", "limit_gib": 1, "peak_gib": 1, "host_gib": 1, **changed}
    )


def plain(base, *, micro_rows=8, shape=FULL):
    model = load_base(Path(base))
    learned = make_trainable(model, shape, seed=1)
    options = StepOptions(micro_rows=micro_rows, activation_checkpointing=True)
    return TrainingEngine(model, learned, settings=SETTINGS, step=options)


def streamed(base, *, overlapped=False, shape=FULL, **changed):
    model = load_base(Path(base))
    learned = make_trainable(model, shape, seed=1)
    return StreamedEngine(
        model, learned, settings=SETTINGS, step=step(**changed), device="cpu", overlapped=overlapped
    )


FAMILIES = {
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def of_family(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2} if name != "gpt2" else {}
    config = AutoConfig.for_model(name, vocab_size=512, **{**sizes, **heads, **FAMILIES[name]})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    return model.requires_grad_(False)


def train(engine, *, skip=0):
    rows, figures = make_rows(), []
    for chosen in STEPS[skip:]:
        measured = engine.backward([rows[at] for at in chosen])
        engine.apply(1e-3)
        figures.append((measured.loss, measured.gradient_norm))
    return figures


def same_weights(one, other):
    ours, theirs = one.learned(), other.learned()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("changed", [{}, {"host_inputs": 2}, {"update": "gpu"}])
def test_losses_and_weights_are_those_of_the_plain_engine_bit_by_bit(tiny_base, overlapped, changed):
    ours, theirs = streamed(tiny_base, overlapped=overlapped, **changed), plain(tiny_base)
    assert train(ours) == train(theirs)
    assert same_weights(ours, theirs)
    assert ours.digest() == theirs.digest()


@pytest.mark.parametrize(
    "changed", [{"micro_rows": 2}, {"micro_rows": 2, "host_inputs": 1}, {"head_tokens": 3}]
)
def test_rows_in_several_passes_and_logits_in_chunks_give_the_same_losses(tiny_base, changed):
    ours = streamed(tiny_base, **changed)
    theirs = plain(tiny_base, micro_rows=changed.get("micro_rows", 8))
    for one, other in zip(train(ours), train(theirs), strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_streamed_to_the_losses_of_the_plain_engine(family):
    ours, theirs = of_family(family), of_family(family)
    learned = make_trainable(ours, FULL, seed=1)
    engine = StreamedEngine(ours, learned, settings=SETTINGS, step=step(), device="cpu", overlapped=False)
    options = StepOptions(micro_rows=8, activation_checkpointing=True)
    plainly = TrainingEngine(theirs, make_trainable(theirs, FULL, seed=1), settings=SETTINGS, step=options)
    for one, other in zip(train(engine), train(plainly), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert engine.mean_loss(make_rows(5), batch_size=2) == pytest.approx(
        plainly.mean_loss(make_rows(5), batch_size=2), rel=1e-6
    )


def test_only_the_upper_layers_are_trained_where_only_they_are_asked_for(tiny_base):
    upper = FULL.model_copy(update={"layers": (1,)})
    ours, theirs = streamed(tiny_base, shape=upper), plain(tiny_base, shape=upper)
    assert train(ours) == train(theirs)
    assert same_weights(ours, theirs)
    assert all("layers.1." in name for name in ours.learned())


def test_a_mean_loss_is_that_of_the_plain_engine(tiny_base):
    ours, theirs = streamed(tiny_base), plain(tiny_base)
    assert ours.mean_loss(make_rows(5), batch_size=2) == pytest.approx(
        theirs.mean_loss(make_rows(5), batch_size=2), rel=1e-6
    )


def test_a_refused_gradient_leaves_no_trace(tiny_base):
    ours, theirs = streamed(tiny_base), streamed(tiny_base)
    ours.backward(make_rows()[5:9])
    ours.forget()
    assert train(ours) == train(theirs)
    assert same_weights(ours, theirs)


def test_either_engine_resumes_what_the_other_began(tiny_base):
    whole = train(streamed(tiny_base))
    for first, second in ((streamed, plain), (plain, streamed)):
        begun = first(tiny_base)
        rows = make_rows()
        begun.backward([rows[at] for at in STEPS[0]])
        begun.apply(1e-3)
        state = {name: tensor.clone() for name, tensor in begun.state().items()}
        resumed = second(tiny_base)
        resumed.restore(state)
        assert train(resumed, skip=1) == whole[1:]


def test_the_state_is_not_a_copy(tiny_base):
    engine = streamed(tiny_base)
    engine.backward(make_rows()[:4])
    engine.apply(1e-3)
    state = engine.state()
    parameters = {parameter.data_ptr() for parameter in engine.model.parameters()}
    assert engine.state_is_live
    held = [tensor for name, tensor in state.items() if name.startswith("adapter/")]
    assert {tensor.data_ptr() for tensor in held} == parameters


@pytest.mark.parametrize(
    "changed", [{}, {"micro_rows": 2}, {"dtype": "bfloat16", "micro_rows": 2}, {"host_inputs": 1}]
)
def test_the_device_holds_what_the_plan_counts(tiny_base, changed):
    engine = streamed(tiny_base, **changed)
    rows = make_rows()[:8]
    for _ in range(2):
        engine.backward(rows)
        engine.apply(1e-4)
    size = changed.get("micro_rows", 8)
    widths = [max(len(row.tokens) for row in rows[at : at + size]) * size for at in range(0, 8, size)]
    planned = held_tensors(read_shape(tiny_base), engine.step, widths)
    counted = dict(engine.device_memory.parts)
    # An input that waits on the host is fetched before it is asked for.
    assert counted == {name: size for name, size in planned.items() if size}
    assert not engine.device_memory.held["inputs"]
    assert not engine.device_memory.held["states"]


def test_bfloat16_weights_follow_a_float32_master(tiny_base):
    half, whole = streamed(tiny_base, dtype="bfloat16"), streamed(tiny_base)
    for (one, _), (other, _) in zip(train(half), train(whole), strict=True):
        assert one == pytest.approx(other, rel=2e-2)
    assert all(tensor.dtype == torch.float32 for tensor in half.learned().values())
