"""The plan spends what a card has, never more, and finds the faster of two ways."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graftwork.costmodel.gpu_memory import load_peak, peak_bytes
from graftwork.costmodel.gpu_time import TrainedPart, gpu_seconds_per_token
from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning, describe_tuning, keep_measured
from graftwork.costmodel.rates import rates_of
from graftwork.plan.catalog.hardware import default_rates, find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.records.base import GIB

SEVEN = find_model("qwen2.5-7b").shape
TRAINABLE = 40_370_176


def choose(limit, *, method="lora", eight=True, longest=2048, step=8192, rates=None):
    return choose_tuning(
        SEVEN,
        TuningRequest(
            method=method, adapted=28, trainable=TRAINABLE, step_tokens=step, longest=longest, eight=eight
        ),
        limit_gib=limit,
        rates=rates or default_rates(),
    )


@given(st.floats(3, 140), st.sampled_from(["lora", "qlora"]), st.booleans(), st.integers(64, 4096))
@settings(max_examples=10, deadline=None)
def test_the_chosen_batch_fits_and_holds_the_longest_row(limit, method, eight, longest):
    tuning = choose(limit, method=method, eight=eight, longest=longest)
    if tuning is None:
        return
    assert peak_bytes(SEVEN, tuning, trainable=TRAINABLE, adapted=28) <= limit * GIB * 1.0001
    assert tuning.peak_gib <= limit * 1.0001
    assert tuning.micro_tokens >= longest
    assert tuning.keep + tuning.lean <= 28


@example(9.640625, 1.015625)
@example(9.6875, 1.015625)
@given(st.floats(6, 60), st.floats(1.01, 2))
@settings(max_examples=6, deadline=None)
def test_more_memory_never_makes_it_slower(limit, more):
    small, large = choose(limit), choose(limit * more)
    if small is not None:
        assert large is not None
        assert large.seconds_per_token <= small.seconds_per_token * 1.0001


@pytest.mark.parametrize(
    ("limit", "measured_gib", "measured_rate"),
    [(9.0, 8.96, 17548), (16.0, 15.24, 22708), (24.0, 22.15, 24822), (48.0, 40.07, 26334)],
)
def test_memory_and_speed_come_near_what_an_h200_measured(limit, measured_gib, measured_rate):
    """The figures of benchmarks/results/train_gpu.json."""
    tuning = choose(limit)
    assert tuning.form == "eight"
    assert tuning.peak_gib == pytest.approx(measured_gib, rel=0.07)
    assert 1 / tuning.seconds_per_token == pytest.approx(measured_rate, rel=0.2)


def test_seven_billion_weights_do_not_fit_five_gib_but_four_bits_fit_six():
    assert choose(5) is None
    assert choose(6, method="qlora", longest=512) is not None


def test_without_products_in_eight_bits_weights_stay_whole_or_go_to_four():
    assert choose(24, eight=False).form == "whole"
    assert choose(24, eight=False, method="qlora").form == "four"


def test_a_measured_step_that_took_less_lets_blocks_keep_more_and_the_reverse():
    tuning = choose(16, step=4096)
    roomy = keep_measured(tuning, SEVEN, measured_gib=9.0, adapted=28)
    tight = keep_measured(tuning, SEVEN, measured_gib=14.0, adapted=28)
    full = keep_measured(tuning, SEVEN, measured_gib=16.5, adapted=28)
    assert (roomy.keep, roomy.lean) > (tight.keep, tight.lean)
    assert (full.keep, full.lean) == (0, 0)


def test_the_plan_says_that_weights_are_in_eight_bits():
    assert "8 bits" in describe_tuning(choose(16))
    assert "host" in describe_tuning(choose(9))


def test_a_vocabulary_that_sixteen_does_not_divide_keeps_its_head_whole():
    odd = SEVEN.model_copy(update={"vocab_size": 152_067})
    tuning = choose_tuning(
        odd,
        TuningRequest(
            method="lora", adapted=28, trainable=TRAINABLE, step_tokens=4096, longest=2048, eight=True
        ),
        limit_gib=24,
        rates=default_rates(),
    )
    assert (tuning.form, tuning.head) == ("eight", "whole")


def test_a_setting_is_ranked_by_the_rates_of_the_card_at_hand():
    usual, named = choose(40), choose(40, rates=rates_of(find_gpu("H200")))
    assert usual == named
    slow = choose(40, rates=rates_of(find_gpu("L4")))
    assert slow.seconds_per_token > 4 * usual.seconds_per_token
    again = gpu_seconds_per_token(
        SEVEN, slow, TrainedPart(adapted=28, trainable=TRAINABLE, rates=rates_of(find_gpu("L4")))
    )
    assert slow.seconds_per_token == pytest.approx(again)


def test_where_a_link_to_the_host_is_slow_the_embedding_stays_on_the_card():
    quick = rates_of(find_gpu("H200"))
    slow = quick.model_copy(update={"host": quick.host / 1000})
    assert not choose(40, rates=slow).host_embedding


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("limit", [7.5, 9, 10, 11, 12, 14])
def test_the_chosen_settings_can_be_loaded(method, limit):
    tuning = choose(limit, method=method)
    if tuning is not None:
        assert load_peak(SEVEN, tuning) <= limit * GIB


def test_a_head_goes_into_8_bits_where_it_could_not_pass_through_32_as_a_whole():
    assert choose(9.5, method="lora").head == "eight"
    assert choose(24, method="lora").head == "eight"
