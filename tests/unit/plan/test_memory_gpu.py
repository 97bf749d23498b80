"""The count of our own step: its parts make the whole, more of anything never takes less."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.gpu_memory import count, gpu_peak, load_peak, peak_bytes
from graftwork.costmodel.gpu_step import load, step_recipe
from graftwork.costmodel.gpu_tensors import ByteTally
from graftwork.model.shape import adapter_parameters, linear_names
from graftwork.records.base import GIB
from graftwork.records.plan import ModelShape, Tuning

SMALL = ModelShape(
    name="small",
    hidden_size=512,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=32_000,
    tied_embeddings=False,
    max_positions=8192,
)
FORMS = st.sampled_from([("whole", "whole"), ("four", "whole"), ("eight", "eight")])


def tuned(*, form=("whole", "whole"), tokens=1024, keep=0, lean=0, limit=100.0, **other):
    settled = {"chunk_tokens": min(512, tokens), "head_tokens": min(256, tokens)}
    settled |= {"turned": False, "host_embedding": False, "compiled": False, **other}
    return Tuning(
        form=form[0],
        head=form[1],
        micro_tokens=tokens,
        longest=tokens,
        keep=keep,
        lean=lean,
        limit_gib=limit,
        peak_gib=0.0,
        seconds_per_token=0.0,
        **settled,
    )


def learned(shape=SMALL, *, rank=8):
    count_of = adapter_parameters(shape, rank=rank, targets=linear_names(shape), layers=shape.layers)
    return {"trainable": count_of, "adapted": shape.layers}


def variants():
    """Biases (Qwen2), norms of each head (Qwen3), norms behind and of all heads (OLMo2)."""
    q, kv = 512, 128
    plain = sum(a * b for a, b in ((512, q), (512, kv), (512, kv), (q, 512), *[(512, 1536)] * 3)) + 1024
    return [
        SMALL.model_copy(update={"block_parameters": plain + more}) for more in (0, q + 2 * kv, 128, q + kv)
    ]


@given(FORMS, st.sampled_from(variants()), st.integers(0, 4), st.integers(0, 4), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_parts_make_the_whole_and_the_quick_sum_is_the_long_one(form, shape, keep, lean, compiled, host):
    lean = min(lean, 4 - keep)
    tuning = tuned(form=form, keep=keep, lean=lean, compiled=compiled, host_embedding=host)
    peak = gpu_peak(shape, tuning, **learned(shape))
    assert sum(peak.parts.values()) == pytest.approx(peak.allocated, rel=1e-9)
    assert min(peak.parts.values()) >= 0
    assert peak.reserved >= peak.allocated
    walk = step_recipe(shape, tuning, **learned(shape))
    assert count(walk).bytes == peak.allocated
    # The quick sum has a margin on what comes and goes, and none on what stands.
    assert peak.allocated <= peak_bytes(shape, tuning, **learned(shape)) <= peak.allocated * 1.04


@given(FORMS, st.integers(64, 4000), st.integers(1, 4000), st.booleans())
@settings(max_examples=15, deadline=None)
def test_more_tokens_never_take_less(form, tokens, more, compiled):
    few, many = (
        gpu_peak(SMALL, tuned(form=form, tokens=size, keep=2, compiled=compiled), **learned())
        for size in (tokens, tokens + more)
    )
    assert few.allocated <= many.allocated


@given(FORMS, st.integers(0, 3), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_block_that_keeps_more_never_takes_less(form, keep, compiled):
    tuning = tuned(form=form, keep=keep, tokens=2048, compiled=compiled)
    more = tuning.model_copy(update={"keep": keep + 1})
    lean = tuning.model_copy(update={"lean": 1})
    here, there, between = (gpu_peak(SMALL, plan, **learned()).allocated for plan in (tuning, more, lean))
    assert here <= between <= there


def test_a_higher_rank_takes_more_and_an_embedding_on_the_host_less():
    plain = gpu_peak(SMALL, tuned(), **learned()).allocated
    assert gpu_peak(SMALL, tuned(), **learned(rank=64)).allocated > plain
    away = gpu_peak(SMALL, tuned(host_embedding=True), **learned()).allocated
    assert plain - away == pytest.approx(32_000 * 512 * 2, abs=4096)


def test_a_fitting_plan_stays_within_the_limit_and_another_says_by_how_much_it_misses():
    tuning = tuned(tokens=2048, keep=4)
    free = gpu_peak(SMALL, tuning, **learned())
    tight = tuning.model_copy(update={"limit_gib": (free.allocated + free.reserved) / 2 / GIB})
    none = tuning.model_copy(update={"limit_gib": free.allocated * 0.9 / GIB})
    assert gpu_peak(SMALL, none, **learned()).reserved > none.limit_gib * GIB
    assert gpu_peak(SMALL, tight, **learned()).allocated == free.allocated


def test_a_large_head_goes_into_8_bits_some_rows_at_a_time():
    wide = SMALL.model_copy(update={"vocab_size": 320_000})
    whole, eight = (tuned(form=form) for form in (("whole", "whole"), ("eight", "eight")))
    assert load_peak(wide, whole) < gpu_peak(wide, whole, **learned()).allocated
    head, embedding, slices = 320_000 * 512, 2 * 320_000 * 512, 2**24 * 16
    assert load_peak(wide, eight) < head + embedding + slices + load_peak(SMALL, eight)


class Patient:
    """A tally that gets every block."""

    alloc, free = ByteTally.alloc, ByteTally.free

    def __init__(self):
        self.now = self.most = self.largest = 0


@pytest.mark.parametrize("form", ["whole", "eight", "four"])
@pytest.mark.parametrize("host", [True, False])
def test_a_tally_that_gets_one_block_and_a_count_gives_the_same_total(form, host):
    setting = tuned(form=(form, "eight" if form == "eight" else "whole"), host_embedding=host)
    sizes = step_recipe(SMALL, setting, trainable=0, adapted=0).sizes
    quick, slow = ByteTally(), Patient()
    for tape in (quick, slow):
        load(tape, sizes, layers=SMALL.layers, tied=SMALL.tied_embeddings, on_host=host)
    assert (quick.now, quick.most) == (slow.now, slow.most)
