"""Layers that stream through the device: the plain engine's losses, the plan's memory, the host's copies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import sys
from pathlib import Path

import pytest
import torch
from distributed_child import FULL, make_rows
from followed_engine import follow
from hypothesis import given
from hypothesis import strategies as st

from graftwork.costmodel.allocations import CUBLAS_WORKSPACE
from graftwork.costmodel.plain_step import PlainRun
from graftwork.costmodel.streamed import StreamedWork, held_tensors, streamed_peak
from graftwork.model.adapters.peft import make_trainable
from graftwork.model.load import load_base
from graftwork.model.shape import read_shape, shape_of, total_parameters
from graftwork.plan.catalog.hardware import default_rates
from graftwork.plan.fit import project as fit
from graftwork.records.plan import StreamedStep
from graftwork.train import host_memory
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.host_memory import HostCopies
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


def lots(monkeypatch):
    """Without a card there are no pages to pin: count instead how often some are asked for."""
    asked = []

    def pinned(size):
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(host_memory, "pinned_buffer", pinned)
    return asked


def test_a_copy_is_not_changed_by_the_next_step():
    weight = torch.ones(3)
    copy = HostCopies().take({"weight": weight})["weight"]
    weight.zero_()
    assert copy.tolist() == [1.0, 1.0, 1.0]


def test_memory_is_got_once_for_each_of_two_lots(monkeypatch):
    asked = lots(monkeypatch)
    copies = HostCopies()
    places = [copies._allocate([torch.zeros(100), torch.zeros(())])[0].data_ptr() for _ in range(6)]
    assert len(asked) == 2
    assert places[0::2] == [places[0]] * 3
    assert places[0] != places[1]


def test_a_state_that_grew_gets_more_room(monkeypatch):
    asked = lots(monkeypatch)
    copies = HostCopies()
    for size in (10, 10, 1000, 1000):
        assert copies._allocate([torch.zeros(size)])[0].numel() == size
    assert len(asked) == 4


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_places_have_the_shape_asked_for_and_do_not_overlap(shapes, dtype):
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    before, host_memory.pinned_buffer = (
        host_memory.pinned_buffer,
        lambda size: torch.zeros(size, dtype=torch.uint8),
    )
    try:
        room = HostCopies()._allocate(tensors)
    finally:
        host_memory.pinned_buffer = before
    for number, place in enumerate(room):
        place.fill_(number)
    found = [place for place in room if place.numel()]
    assert all((place == number).all() for number, place in enumerate(room) if place.numel())
    assert [tuple(place.shape) for place in room] == [tuple(tensor.shape) for tensor in tensors[: len(room)]]
    assert len(found) == sum(1 for tensor in tensors if tensor.numel())
