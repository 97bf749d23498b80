"""The peak of a step of transformers and PEFT, from sizes alone: what must hold whatever the model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.plain_step import plain_peak, plain_trace, replayed
from graftwork.records.plan import ModelShape, PlainSetup

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = ModelShape(
    name="small",
    hidden_size=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    vocab_size=1024,
    tied_embeddings=False,
    max_positions=4096,
)


def setup(**changed: object) -> PlainSetup:
    return PlainSetup.model_validate({"targets": LINEARS, "adapted_layers": 4, "tokens": 512, **changed})


def allocated(**changed: object) -> float:
    return plain_peak(SHAPE, setup(**changed)).allocated


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(64, 2048),
    method=st.sampled_from(["lora", "qlora", "full", "dora"]),
    loss=st.sampled_from(["plain", "fused"]),
)
def test_more_tokens_never_take_less(tokens: int, method: str, loss: str) -> None:
    less = allocated(tokens=tokens, method=method, loss=loss)
    assert allocated(tokens=2 * tokens, method=method, loss=loss) >= less


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_layers_that_compute_again_take_less(method: str) -> None:
    peaks = [allocated(method=method, checkpointed=count, tokens=2048) for count in (0, 2, 4)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_fused_loss_saves_most_of_the_logits() -> None:
    wide = SHAPE.model_copy(update={"vocab_size": 32000})
    plain, fused = (plain_peak(wide, setup(tokens=1024, loss=loss)).allocated for loss in ("plain", "fused"))
    assert plain - fused > 0.8 * 12 * 1024 * 32000


def test_weights_in_four_bits_take_a_quarter_of_the_linears() -> None:
    whole = plain_trace(SHAPE, setup(method="lora")).phases["setup"]
    four = plain_trace(SHAPE, setup(method="qlora", kbit_upcast=False)).phases["setup"]
    linears = 4 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 768)
    assert whole - four == pytest.approx(linears * (2 - 4.127 / 8), rel=0.02)


def test_optimizers_rank_by_what_they_keep_and_take() -> None:
    wide = SHAPE.model_copy(update={"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256})
    order = ["sgd", "adamw_8bit", "adamw_fused", "adamw_foreach"]
    peaks = [
        plain_peak(wide, setup(method="full", tokens=64, optimizer=name, autocast=False)).allocated
        for name in order
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_everything_that_is_taken_but_weights_and_states_is_given_back() -> None:
    trace = plain_trace(SHAPE, setup(checkpointed=2))
    held = sum(trace.sizes[e] if e >= 0 else -trace.sizes[~e] for e in trace.events)
    kept = trace.phases["setup"] + 2 * 4 * 4 * 16 * sum(
        (256 + 256, 256 + 128, 256 + 128, 512, 1024, 1024, 1024)
    )
    assert held == pytest.approx(kept + 64 * 2**20, rel=0.01)


def test_parts_are_those_of_the_peak_and_reserved_holds_allocated() -> None:
    peak = plain_peak(SHAPE, setup())
    assert sum(peak.parts.values()) == pytest.approx(peak.allocated, rel=1e-6)
    assert peak.reserved >= peak.allocated


def test_expandable_segments_do_not_change_what_is_allocated_by_much() -> None:
    trace = plain_trace(SHAPE, setup())
    assert replayed(trace, expandable=True).allocated == pytest.approx(replayed(trace).allocated, rel=0.05)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "mistral", "unheard-of"]
)
def test_every_family_has_an_answer(family: str) -> None:
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if family == "phi3" else LINEARS
    assert plain_peak(SHAPE, setup(targets=targets), architecture=family).allocated > 0
