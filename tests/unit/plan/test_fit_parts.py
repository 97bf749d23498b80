"""The pieces of `plan.fit`: sharing, offloading, long rows, generation, the roof."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.plain_step import (
    Distribution,
    adam_seconds,
    expected_longest,
    exposed,
    link_rate,
    passing_setup,
    plain_peak,
    quick_peak,
    share,
    transfers,
)
from graftwork.costmodel.rates import rates_of
from graftwork.costmodel.rollouts import launched_seconds
from graftwork.model.shape import cache_bytes, linear_names, total_parameters
from graftwork.plan.catalog.hardware import find_cpu, find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.fit.answer import say_time
from graftwork.plan.fit.candidates import (
    host_memory,
    most_tokens_per_second,
    require_possible,
    rows_at_once,
    trained,
)
from graftwork.plan.fit.question import late_chance, length_that_fits, make_question, share_above, truths
from graftwork.records.base import GIB
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions, MemoryPeak, PlainSetup

MODEL = find_model("deepseek-coder-6.7b")
SHAPE = MODEL.shape
ALONE = MemoryPeak(
    allocated=40.0 * GIB,
    reserved=41.0 * GIB,
    parts={"weights": 30.0 * GIB, "activations": 8.0 * GIB, "workspace": 2.0 * GIB},
    phase="backward",
)


def question(gpu="RTX 5060 Ti 16GB", gpus=2, **more):
    machine = Machine(gpu=find_gpu(gpu), gpus=gpus, ram_gib=128.0, cpu=find_cpu("9950X"))
    return make_question(MODEL, FitOptions(**more), machine=machine)


def setup(method="full", **more):
    return PlainSetup(
        method=method, targets=linear_names(SHAPE), adapted_layers=SHAPE.layers, tokens=2048, **more
    )


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp2"])
def test_more_cards_hold_less_each(sharding):
    trainable = total_parameters(SHAPE)
    held = [
        share(ALONE, SHAPE, setup(), Distribution(sharding, "none", cards), trainable=trainable).allocated
        for cards in (2, 4, 8)
    ]
    assert held[0] > held[1] > held[2]


def test_offloading_takes_states_and_then_weights_off_the_card():
    trainable = total_parameters(SHAPE)
    none, optimizer, weights = (
        share(ALONE, SHAPE, setup(), Distribution("zero3", offload, 2), trainable=trainable)
        for offload in ("none", "optimizer", "weights")
    )
    assert none.parts["optimizer"] == pytest.approx(trainable * 12 / 2)
    assert optimizer.parts["optimizer"] == 0.0
    assert optimizer.parts["weights"] == pytest.approx(trainable)
    assert weights.parts["weights"] == 0.0
    assert none.allocated > optimizer.allocated > weights.allocated
    assert sum(weights.parts.values()) == pytest.approx(weights.allocated)


def test_ddp_adds_a_copy_of_the_gradients():
    shared = share(ALONE, SHAPE, setup("lora"), Distribution("ddp", "none", 2), trainable=10**7)
    assert shared.allocated - ALONE.allocated == pytest.approx(4e7)


def test_an_offloaded_7b_takes_sixteen_to_eighteen_bytes_a_parameter_of_the_host():
    asked = question(method="full")
    parameters = trained(asked)
    host = host_memory(
        asked, Distribution("zero3", "weights", 2), trainable=parameters, base_bytes=2.0 * parameters
    )
    assert host.low * GIB > 16 * parameters
    assert 18 * parameters < host.high * GIB < 20 * parameters
    assert 115e9 < host.value * GIB < 125e9


def test_transfers_and_adam_cost_what_their_bytes_do():
    asked = question(method="full")
    parameters = trained(asked)
    none = transfers(
        asked.machine, Distribution("zero3", "none", 2), setup(), trainable=parameters, base_bytes=1.0
    )
    assert none == (0.0, 0.0, 0.0)
    moved = transfers(
        asked.machine, Distribution("zero3", "weights", 2), setup(), trainable=parameters, base_bytes=1.0
    )
    assert moved.a_pass == pytest.approx(3 * parameters * 2 / 2 / (31.5e9 * 0.8), rel=0.01)
    assert moved.adam == adam_seconds(asked.machine, parameters)
    assert 2 < moved.adam < 6


@given(computing=st.floats(0, 1e3), moving=st.floats(0, 1e3))
def test_the_exposed_part_of_a_transfer_is_never_longer_than_the_transfer(computing, moving):
    assert 0 <= exposed(computing, moving) <= moving + 1e-9


def test_the_link_is_what_was_stated_or_less_than_the_connector():
    assert link_rate(question().machine) < 31.5
    assert link_rate(question().machine.model_copy(update={"link_gb_s": 7.0})) == 7.0


@given(lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=50), rows=st.integers(1, 16))
def test_padding_goes_up_to_the_longest_and_grows_with_the_rows(lengths, rows):
    padded = expected_longest(lengths, rows)
    assert sum(lengths) / len(lengths) - 1e-6 <= padded <= max(lengths) + 1e-6
    assert expected_longest(lengths, rows + 1) >= padded - 1e-6


def test_rows_of_one_length_do_not_run_out_late():
    for most in (1000.0, 4000.0):
        assert late_chance([2048], rows_in_run=1000, rows_at_once=4, largest_that_fits=[most]) == 0.0


def test_one_long_row_in_a_thousand_runs_out_late_almost_surely():
    lengths = [500] * 999 + [4000]
    late = late_chance(lengths, rows_in_run=1000, rows_at_once=1, largest_that_fits=[2048.0])
    assert 0.5 < late < 1.0
    assert late_chance(lengths, rows_in_run=1000, rows_at_once=1, largest_that_fits=[4096.0]) == 0.0


def test_a_sample_leaves_a_doubt_that_all_rows_do_not():
    sample = list(range(100, 1100))
    assert share_above(sample, 1200.0, rows_in_run=1000) == 0.0
    doubt = share_above(sample, 1200.0, rows_in_run=100_000)
    assert 0 < doubt < 0.01
    assert share_above(sample, 3000.0, rows_in_run=100_000) == 0.0


@given(value=st.floats(1.0, 1e6), spread=st.floats(0.001, 0.2))
def test_true_values_are_around_the_stated_value(value, spread):
    around = truths(value, spread=spread)
    assert sum(around) / len(around) == pytest.approx(value, rel=0.01)
    assert min(around) > value * (1 - 1.5 * spread)
    assert max(around) < value * (1 + 1.5 * spread)


def test_the_length_that_fits_is_where_the_line_meets_the_room():
    assert length_that_fits(room=10.0, floor=4.0, at_longest=7.0, longest=300) == pytest.approx(600)
    assert length_that_fits(room=10.0, floor=4.0, at_longest=4.0, longest=300) == math.inf


def test_keys_and_values_of_a_7b_take_half_a_mib_a_token():
    assert cache_bytes(SHAPE, tokens=1, width=2) == 2 * 32 * 32 * 128 * 2


def test_decoding_never_beats_the_memory_of_the_card():
    gpu = find_gpu("RTX 5060 Ti 16GB")
    least = 100 * 2 * total_parameters(SHAPE) * 0.98 / (gpu.bandwidth_gb_s * 1e9)
    taken = launched_seconds(SHAPE, prompt=512, completion=100, rows=1, rates=rates_of(gpu), four_bits=False)
    assert taken > least


@given(gib=st.floats(4.5, 16.0), batch=st.integers(1, 64))
@settings(deadline=None)
def test_answers_that_do_not_all_fit_are_generated_in_even_rounds(gib, batch):
    asked = question(gpus=1, algorithm="grpo", batch_size=batch)
    rows = rows_at_once(asked, 4.5 * GIB, room=gib * GIB, gpus=1)
    rounds = -(-batch // rows)
    assert rows == -(-batch // rounds)


@pytest.mark.parametrize(
    ("minutes", "output"),
    [(1.0, "60 s"), (90.0, "90 min"), (119.6, "2.0 h"), (306.0, "5.1 h"), (18358, "12.7 days")],
)
def test_a_time_is_reported_in_the_unit_that_people_use(minutes, output):
    assert say_time(minutes) == output


def test_a_claim_above_the_roof_is_refused_with_the_arithmetic():
    machine = Machine(gpu=find_gpu("RTX 5060 Ti 16GB"), gpus=1, ram_gib=128.0)
    asked = make_question(find_model("llama-3.1-8b"), FitOptions(method="qlora"), machine=machine)
    with pytest.raises(UserError, match=r"is not possible: it needs \d+ of 47 TFLOPS"):
        require_possible(asked, 3200.0)
    most = most_tokens_per_second(asked)
    assert most is not None
    assert 1000 < most < 2500
    assert require_possible(asked, 0.5 * most) == pytest.approx(0.5)


@pytest.mark.parametrize("method", ["qlora", "lora"])
@pytest.mark.parametrize("checkpointed", [0, 32])
def test_the_quick_peak_is_near_the_exact_one(method, checkpointed):
    asked = setup(method, checkpointed=checkpointed, rows=2)
    exact = plain_peak(SHAPE, asked, architecture="llama")
    quick = quick_peak(SHAPE, asked, architecture="llama", trainable=trained(question(method=method)))
    assert quick.allocated == pytest.approx(exact.allocated, rel=0.02)
    assert quick.reserved == pytest.approx(exact.reserved, rel=0.08)


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(64, 20000), more=st.integers(1, 5000))
def test_longer_rows_never_need_less_memory(tokens, more):
    small = find_model("llama-3.2-1b").shape

    def peak(length):
        asked = PlainSetup(
            method="lora", targets=linear_names(small), adapted_layers=small.layers, tokens=length
        )
        return quick_peak(small, asked, architecture="llama", trainable=10**7)

    assert peak(tokens + more).allocated >= peak(tokens).allocated
    assert peak(tokens + more).reserved >= peak(tokens).reserved


@pytest.mark.parametrize(
    ("method", "tokens", "checkpointed", "traced_gib"),
    [("qlora", 2048, 32, 5.1), ("qlora", 8192, 32, 8.9), ("qlora", 2048, 0, 15.0), ("lora", 2048, 32, 14.3)],
)
def test_peaks_of_a_7b_are_those_that_were_traced(method, tokens, checkpointed, traced_gib):
    """Traced on the meta device with 16-bit adapters and nothing brought to float32."""
    asked = setup(
        method, checkpointed=checkpointed, adapter_dtype="bfloat16", autocast=False, kbit_upcast=False
    ).model_copy(update={"tokens": tokens})
    peak = plain_peak(SHAPE, asked, architecture="llama").allocated / GIB
    assert peak == pytest.approx(traced_gib, rel=0.05)


def test_logits_and_activations_are_counted_besides_sharded_gradients():
    asked = setup(checkpointed=SHAPE.layers)
    passing = plain_peak(SHAPE, passing_setup(asked), architecture="llama")
    shared = share(
        passing, SHAPE, asked, Distribution("zero3", "weights", 2), trainable=total_parameters(SHAPE)
    )
    # The logits of 2,048 places and their gradient, and a block's activations.
    assert shared.parts["logits"] > 8 * SHAPE.vocab_size * 2048 * 0.9
    assert shared.parts["activations"] > 2 * SHAPE.hidden_size * 2048 * SHAPE.layers
