"""Memory of our own step: what must hold of every count, and the tensors that a step really makes."""

import weakref

import pytest
import sample_plans
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)

from graftwork.costmodel.gpu_memory import count, gpu_peak, load_peak, peak_bytes
from graftwork.costmodel.gpu_step import load, step_recipe, take_pass
from graftwork.costmodel.gpu_tensors import ByteTally
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.parts import block_linears
from graftwork.model.shape import adapter_parameters, linear_names, linear_sizes, shape_of
from graftwork.records.base import GIB
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.records.plan import ModelShape
from graftwork.train.gpu.engine import GpuEngine
from graftwork.train.gpu.load import load_quantized
from graftwork.train.settings import TrainSettings

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
    chunks = {"micro_tokens": tokens, "chunk_tokens": min(512, tokens), "head_tokens": min(256, tokens)}
    levels = {"longest": tokens, "keep": keep, "lean": lean, "compiled": False, "limit_gib": limit}
    return sample_plans.make_tuning(form=form[0], head=form[1], **{**chunks, **levels, **other})


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


LAYERS, TOKENS, RANK = 3, 256, 8
SHAPE = ModelShape(
    name="watched",
    hidden_size=256,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    vocab_size=2048,
    tied_embeddings=False,
    max_positions=512,
)
BESIDE = {Qwen2Config: 256 + 2 * 128, Qwen3Config: 2 * 64, Olmo2Config: 256 + 128}
"""Parameters of a block beyond Llama's."""


BY_FAMILY = (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    SmolLM3Config,
    Starcoder2Config,
)
"""Counted by the layout of their family."""


class Watch(TorchDispatchMode):
    """Bytes of all tensors that are alive, each storage once, and their peak."""

    def __init__(self):
        super().__init__()
        self.tally, self.sizes = ByteTally(), {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        del types
        out = function(*arguments, **(named or {}))
        given = {_storage(leaf) for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := _storage(tensor)) not in given | self.sizes.keys()
            ):
                storage = tensor.untyped_storage()
                self.sizes[key] = self.tally.alloc(storage.nbytes())
                weakref.finalize(storage, self._let_go, key)
        return out

    def _let_go(self, key):
        self.tally.free(self.sizes.pop(key))


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def make_tuning(form, keep, lean, *, chunk=128, head=64):
    chunks = {"micro_tokens": TOKENS, "longest": TOKENS, "chunk_tokens": chunk, "head_tokens": head}
    return sample_plans.make_tuning(form=form, keep=keep, lean=lean, compiled=False, limit_gib=8.0, **chunks)


def make_config(config):
    named = config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if config is MistralConfig:
        named.sliding_window = None
    if config is GraniteConfig:
        named.residual_multiplier = 0.22
    return named


def watched_peak(config, tuning):
    """The most that one pass holds beyond what stands: the second pass, whose gradients are added."""
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(make_config(config), dtype=torch.bfloat16)
        .eval()
        .requires_grad_(False)
    )
    frozen = load_quantized(model, tuning, device="cpu")
    adapter = AdapterShape(rank=RANK, alpha=8, targets=targets_of(model), layers=tuple(range(LAYERS)))
    learned = attach(model, adapter, seed=1)
    settings = TrainSettings(rank=RANK, alpha=8)
    engine = GpuEngine(model, learned, settings=settings, frozen=frozen, tuning=tuning, shape=SHAPE)
    message = (Message(role="user", content="x"),)
    row = Row(
        id="1",
        origin=Origin(file="log.jsonl", line=1),
        messages=message,
        reply="y",
        tokens=tuple(at % 2048 for at in range(TOKENS)),
        trained_from=1,
    )
    engine.settle([row])
    engine.backward([row])
    engine.apply(1e-4)
    with Watch() as watch:
        engine.backward([row])
    return watch.tally.most


def targets_of(model):
    return tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for _, path, _ in block_linears(model)))


def counted_peak(config, tuning):
    plain = sum(a * b for a, b in linear_sizes(SHAPE).values()) + 2 * SHAPE.hidden_size
    shape = SHAPE.model_copy(update={"block_parameters": plain + BESIDE.get(config, 0)})
    if config in BY_FAMILY:
        shape = shape_of(make_config(config).to_dict(), name="watched")
    trainable = adapter_parameters(shape, rank=RANK, targets=linear_names(shape), layers=LAYERS)
    tally = ByteTally()
    walk = step_recipe(shape, tuning, trainable=trainable, adapted=LAYERS, places=TOKENS - 1)
    take_pass(tally, walk, keep_gradients=False)
    return tally.most


@pytest.mark.parametrize(
    ("config", "form", "keep", "lean"),
    [
        (LlamaConfig, "whole", 0, 0),
        (LlamaConfig, "whole", 3, 0),
        (LlamaConfig, "whole", 0, 3),
        (LlamaConfig, "four", 1, 1),
        (MistralConfig, "four", 0, 0),
        (Qwen2Config, "whole", 1, 1),
        (Qwen3Config, "whole", 1, 1),
        (Qwen3Config, "whole", 0, 0),
        (Olmo2Config, "whole", 1, 1),
        (Olmo2Config, "whole", 0, 0),
        *[(config, "whole", 1, at % 2) for at, config in enumerate(BY_FAMILY)],
    ],
)
def test_the_count_of_a_pass_is_what_the_pass_holds(config, form, keep, lean):
    tuning = make_tuning(form, keep, lean)
    assert counted_peak(config, tuning) == pytest.approx(watched_peak(config, tuning), rel=0.01)


@pytest.mark.parametrize(("chunk", "head"), [(32, 64), (256, 256)])
def test_many_chunks_are_counted_as_few_and_few_as_many(chunk, head):
    tuning = make_tuning("whole", 0, 1, chunk=chunk, head=head)
    assert counted_peak(LlamaConfig, tuning) == pytest.approx(watched_peak(LlamaConfig, tuning), rel=0.01)
