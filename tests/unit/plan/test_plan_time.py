"""Seconds come near what was measured, never beat the hardware, and grow with the work."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
import sample_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from published_rates import PUBLISHED, compare_published
from roofline_oracle import is_possible, least_seconds

from graftwork.costmodel.cpu_step import seconds_per_token
from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_seconds_per_token, gpu_step_time
from graftwork.costmodel.plain_step import link_seconds, plain_step
from graftwork.costmodel.rates import rates_of
from graftwork.model.shape import linear_names
from graftwork.plan.catalog.hardware import find_cpu, find_gpu, list_gpus
from graftwork.plan.catalog.models import find_model
from graftwork.records.plan import PlainSetup, Tuning, Workload

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "train_gpu.json"
SEVEN = find_model("qwen2.5-7b").shape
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRAINABLE = 40_370_176
H200, P100, T4 = (find_gpu(name) for name in ("H200 SXM", "P100", "T4"))


def make_tuning(**changes) -> Tuning:
    whole = {"micro_tokens": 4096, "longest": 2048, "keep": 28, "chunk_tokens": 4096, "head_tokens": 2048}
    return sample_plans.make_tuning(**{**whole, "limit_gib": 100, "peak_gib": 50, **changes})


def seconds_of(tuning, gpu=H200, length=2048.0):
    step = gpu_step_time(
        SEVEN,
        tuning,
        TrainedPart(adapted=28, trainable=TRAINABLE, rates=rates_of(gpu)),
        RowStatistics(mean_length=length),
    )
    return sum(step.parts.values()) + sum(step.once_per_step.values())


def setup_of(**changes):
    return PlainSetup.model_validate(
        {"targets": TARGETS, "adapted_layers": 28, "tokens": 2048, "rows": 4, **changes}
    )


def plain_seconds(setup, gpu=H200):
    step = plain_step(SEVEN, setup, rates=rates_of(gpu))
    return sum(step.parts.values()) + sum(step.once_per_step.values())


def test_our_step_comes_near_everything_that_an_h200_measured():
    runs = json.loads(MEASURED.read_text())["figures"]["ours"]
    off = []
    for run in runs:
        tuning = Tuning.model_validate(run["tuning"])
        measured = tuning.micro_tokens / run["tokens_per_second"]
        off.append(abs(seconds_of(tuning) / measured - 1))
    assert len(off) >= 9
    assert median(off) < 0.05
    assert max(off) < 0.15


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        ("hf-liger-lora-none-mb4", setup_of(loss="fused", liger=True)),
        ("trl-liger-lora-gc-mb4", setup_of(loss="fused", liger=True, checkpointed=28)),
    ],
)
def test_the_plain_step_comes_near_what_transformers_and_peft_measured(name, setup):
    peers = {peer["name"]: peer for peer in json.loads(MEASURED.read_text())["figures"]["peers"]}
    assert plain_seconds(setup) == pytest.approx(peers[name]["step_seconds"], rel=0.15)


def test_the_page_reports_how_far_published_figures_are_from_ours():
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text()
    output = re.search(r"are (\d+) to (\d+) % above the estimates of the planner", page)
    assert output is not None
    above = [
        rate.tokens_per_second
        / compare_published(rate, find_model(rate.model).shape, rates_of(find_gpu(rate.gpu))).estimated
        for rate in PUBLISHED
    ]
    assert [round(100 * (ratio - 1)) for ratio in (min(above), max(above))] == [
        int(n) for n in output.groups()
    ]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda item: f"{item.engine} {item.gpu} {item.method}")
def test_published_figures_of_other_cards_are_of_the_same_order(published):
    """A comparison, not a gate: others' engines and settings are not ours."""
    compared = compare_published(
        published, find_model(published.model).shape, rates_of(find_gpu(published.gpu))
    )
    assert 0.6 < compared.estimated / published.tokens_per_second < 1.4


@given(
    st.sampled_from(["whole", "eight", "four"]),
    st.sampled_from([256, 1024, 4096, 16384]),
    st.integers(0, 28),
    st.sampled_from([H200, T4, P100]),
)
@settings(max_examples=60, deadline=None)
def test_no_estimate_of_ours_beats_peak_products_or_bandwidth(form, tokens, keep, gpu):
    head = "eight" if form == "eight" else "whole"
    chunk = min(tokens, 2048)
    tuning = make_tuning(
        form=form, head=head, micro_tokens=tokens, keep=keep, chunk_tokens=chunk, head_tokens=chunk
    )
    roof = least_seconds(SEVEN, tokens=tokens, adapted=28, rates=rates_of(gpu), eight=form == "eight")
    assert is_possible(seconds_of(tuning, gpu), roof)


@given(
    st.sampled_from(["lora", "qlora", "full"]),
    st.integers(1, 4096),
    st.integers(0, 28),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from([H200, T4, P100]),
)
@settings(max_examples=60, deadline=None)
def test_no_estimate_of_a_plain_step_beats_peak_products_or_bandwidth(method, tokens, again, dtype, gpu):
    setup = setup_of(method=method, tokens=tokens, rows=1, checkpointed=again, dtype=dtype)
    roof = least_seconds(SEVEN, tokens=tokens, adapted=28, rates=rates_of(gpu), full=method == "full")
    assert is_possible(plain_seconds(setup, gpu), roof)


@given(st.sampled_from([512, 1024, 2048, 8192]), st.floats(64, 4096), st.floats(1.05, 4))
@settings(max_examples=40, deadline=None)
def test_longer_rows_and_more_computed_again_never_take_less(tokens, length, more):
    tuning = make_tuning(micro_tokens=tokens, chunk_tokens=min(tokens, 2048))
    assert seconds_of(tuning, length=length * more) >= seconds_of(tuning, length=length)
    less = tuning.model_copy(update={"keep": 20})
    assert seconds_of(less, length=length) > seconds_of(tuning, length=length)


def test_a_token_costs_a_step_shared_by_its_tokens():
    tuning = make_tuning()
    a_token = gpu_seconds_per_token(SEVEN, tuning, TrainedPart(28, TRAINABLE, rates_of(H200)))
    assert a_token * tuning.micro_tokens == pytest.approx(seconds_of(tuning))


def test_an_eager_step_of_a_small_model_is_bound_by_launches():
    small = SEVEN.model_copy(update={"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000})
    tuning = make_tuning(micro_tokens=256, chunk_tokens=256, head_tokens=256, compiled=False)
    step = gpu_step_time(
        small,
        tuning,
        TrainedPart(adapted=28, trainable=1000, rates=rates_of(H200)),
        RowStatistics(mean_length=256),
    )
    assert step.parts["waiting for launches"] > sum(step.parts.values()) / 2
    plain = plain_step(small, setup_of(tokens=32, rows=1), rates=rates_of(H200))
    assert plain.parts["waiting for launches"] > sum(plain.parts.values()) / 2


def test_bfloat16_on_a_card_without_it_is_much_slower_than_float16():
    setup = setup_of(dtype="bfloat16")
    assert plain_seconds(setup, T4) > 2 * plain_seconds(setup_of(dtype="float16"), T4)
    assert not rates_of(T4).has_bf16


def test_a_card_without_tensor_cores_has_rates_too():
    rates = rates_of(P100)
    assert 0 < rates.single <= rates.half <= rates.peak_half
    assert rates.eight is None
    assert rates.best_eight == rates.half


def test_every_card_of_the_catalog_stays_below_what_its_maker_states():
    for gpu in list_gpus():
        rates = rates_of(gpu)
        assert 0 < rates.single <= rates.half < rates.peak_half
        assert rates.bandwidth < rates.peak_bandwidth
        assert rates.attention < rates.half
        assert (rates.eight is not None) == gpu.has_fp8


def test_four_bits_cost_time_and_eight_save_it():
    assert plain_seconds(setup_of(method="qlora")) > plain_seconds(setup_of())
    whole, eight = make_tuning(), make_tuning(form="eight", head="eight", turned=True)
    assert seconds_of(eight) < seconds_of(whole) < seconds_of(make_tuning(form="four"))


def test_two_cards_send_their_bytes_once_and_many_nearly_twice():
    assert link_seconds(1e9, gpus=1, gb_s=10) == 0
    assert link_seconds(1e9, gpus=2, gb_s=10) == pytest.approx(0.1)
    assert link_seconds(160e6, gpus=2, gb_s=10) == pytest.approx(0.016)
    assert 0.1 < link_seconds(1e9, gpus=8, gb_s=10) < 0.2


def test_a_processor_is_slower_for_more_tokens_and_more_layers():
    cpu = find_cpu("Ryzen 9950X")

    def seconds(tokens, adapted, method="lora"):
        work = Workload(
            lengths=(tokens,),
            trained_tokens=tokens,
            batch_size=1,
            epochs=1,
            rank=16,
            targets=linear_names(SEVEN),
            adapted_layers=adapted,
            method=method,
        )
        return tokens * sum(seconds_per_token(SEVEN, work, gflops=cpu.gflops).values())

    assert seconds(512, 28) < seconds(1024, 28)
    assert seconds(512, 8) < seconds(512, 28) < seconds(512, 28, "full")
    # No faster than its products: 4 operations a weight and token.
    assert seconds(512, 28) > 4 * 6.5e9 * 512 / (cpu.gflops * 1e9)
