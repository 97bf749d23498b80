"""Sampling answers during training: the plan counts the tensors that the generator really makes."""

import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from family_samples import make as make_family

from graftwork.costmodel.rollouts import (
    PromptPass,
    batch_size,
    cpu_seconds,
    gpu_seconds,
    prompt_bytes,
    sampling_bytes,
    sampling_memory,
    sampling_sizes,
)
from graftwork.model.generate import cache, decoder
from graftwork.model.generate.generator import StaticDecoder, open_decoder
from graftwork.model.generate.lean import LeanPass
from graftwork.model.generate.scheduler import MOST_ROWS, DecoderSizes
from graftwork.model.shape import cache_bytes, shape_of
from graftwork.plan.catalog.hardware import default_rates
from graftwork.records.plan import ModelShape, RolloutLoad
from graftwork.train.rollouts.sampling import AskedPrompt, RolloutSampler, SamplingPasses
from graftwork.train.settings import RolloutSettings

WIDTH = 4.0
SHAPE = ModelShape(
    name="tiny",
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate_size=96,
    vocab_size=120,
    tied_embeddings=False,
    max_positions=4096,
)


def make_model(shape=SHAPE):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def load_of(prompts, answers, length, most, *, at_once=None, **changes):
    return RolloutLoad(
        prompts=prompts,
        answers=answers,
        prompt_tokens=length,
        max_tokens=most,
        answer_tokens=most,
        prompts_at_once=at_once,
        **changes,
    )


class Allocations:
    """What a generator allocates: bytes of its cache, passes over prompts, rows of logits, columns read."""

    def __init__(self, model, monkeypatch):
        self.cache, self.logit_rows = 0, 0
        self.passes, self.columns = set(), set()
        model.register_forward_pre_hook(self._see_pass, with_kwargs=True)
        allocate, run, choose = cache.SlotCache._allocate, LeanPass.run, decoder.choose_tokens

        def see_cache(slots, *sizes):
            room = allocate(slots, *sizes)
            self.cache = max(self.cache, room.nbytes)
            return room

        def see_tokens(lean, tokens, positions, slots, columns):
            self.columns.add(columns)
            return run(lean, tokens, positions, slots, columns)

        def see_logits(logits, *rest):
            self.logit_rows = max(self.logit_rows, logits.shape[0])
            return choose(logits, *rest)

        read = LeanPass.read

        def see_prompts(lean, parts, slots, **choice):
            ends = [start + len(tokens) for _, tokens, start in parts]
            self.passes.add(PromptPass(len(parts), max(len(tokens) for _, tokens, _ in parts), max(ends)))
            return read(lean, parts, slots, **choice)

        monkeypatch.setattr(LeanPass, "read", see_prompts)
        monkeypatch.setattr(cache.SlotCache, "_allocate", see_cache)
        monkeypatch.setattr(LeanPass, "run", see_tokens)
        monkeypatch.setattr(decoder, "choose_tokens", see_logits)

    def _see_pass(self, _model, _given, named):
        if (mask := named.get("attention_mask")) is not None:
            rows, width = named["input_ids"].shape
            self.passes.add(PromptPass(rows, width, mask.shape[-1]))


def sample(load, model, *, recorded, lengths=None):
    """All answers reach the limit: the end of turn is no token of the model."""
    settings = RolloutSettings(
        source="prompts.jsonl",
        prompts=load.prompts,
        num_generations=load.answers,
        max_completion_length=load.max_tokens,
    )
    sampler = RolloutSampler(
        model,
        settings=settings,
        seed=5,
        end_of_turn=-1,
        decode=str,
        passes=SamplingPasses(prompts_at_once=load.prompts_at_once, recorded=recorded),
    )
    lengths = lengths or [round(load.prompt_tokens)] * load.prompts
    asked = [
        AskedPrompt(str(at), [(7 * at + 3 * place) % 120 for place in range(length)])
        for at, length in enumerate(lengths)
    ]
    return sampler.sample(1, asked)


SAMPLED = [
    load_of(3, 4, 30, 12),
    load_of(5, 3, 100, 60),
    load_of(1, 6, 40, 20),
    load_of(4, 4, 70, 3, at_once=2),
    load_of(3, 2, 700, 5),
    load_of(20, 2, 601, 24),
    load_of(2, 140, 20, 3),
]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("load", SAMPLED, ids=lambda load: f"{load.rows}x{load.prompt_tokens:g}")
def test_the_plan_has_the_tensors_that_the_generator_makes(load, recorded, monkeypatch):
    model = make_model()
    made = Allocations(model, monkeypatch)
    sample(load, model, recorded=recorded)
    sizes = sampling_sizes(load, recorded=recorded)
    planned = sampling_memory(SHAPE, load, width=WIDTH, recorded=recorded)
    assert made.cache == planned["key-value cache"]
    assert made.cache == cache_bytes(SHAPE, tokens=sizes.columns, rows=sizes.slots, width=WIDTH)
    if load.rows <= MOST_ROWS:
        assert made.passes == set(sizes.prompts)
    else:
        # Rows beyond the slots come later, in passes that are no larger.
        largest = max(prompt_bytes(SHAPE, read, width=WIDTH) for read in made.passes)
        assert largest == max(prompt_bytes(SHAPE, read, width=WIDTH) for read in sizes.prompts)
    assert made.logit_rows == sizes.token_rows
    if recorded:
        assert len(made.columns) == sizes.recordings


@pytest.mark.parametrize("recorded", [False, True])
def test_prompts_of_several_lengths_take_no_more_than_was_planned(recorded, monkeypatch):
    lengths = [20, 300, 45, 150]
    load = load_of(4, 3, sum(lengths) / 4, 30, longest_prompt=max(lengths))
    model = make_model()
    made = Allocations(model, monkeypatch)
    sample(load, model, recorded=recorded, lengths=lengths)
    planned = sampling_memory(SHAPE, load, width=WIDTH, recorded=recorded)
    assert made.cache == planned["key-value cache"]
    read = sampling_sizes(load, recorded=recorded).prompts
    most = max(prompt_bytes(SHAPE, some, width=WIDTH) for some in read)
    assert max(prompt_bytes(SHAPE, some, width=WIDTH) for some in made.passes) <= most


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were made within and are still there."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self._known = 0, 0, set()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        before = {
            _address(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        found = function(*args, **(kwargs or {}))
        for tensor in tree_iter(found):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in before:
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage):
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key, size):
        self._known.discard(key)
        self.now -= size


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("heads", "groups", "inner"), [(4, 4, 384), (8, 2, 384), (8, 1, 64)], ids=["mlp", "grouped", "attention"]
)
@pytest.mark.parametrize("read", [PromptPass(4, 96, 128), PromptPass(24, 1, 256)], ids=["prompts", "last"])
def test_reading_prompts_holds_what_is_planned(heads, groups, inner, read):
    shape = SHAPE.model_copy(
        update={
            "hidden_size": 128,
            "heads": heads,
            "kv_heads": groups,
            "head_dim": 16,
            "intermediate_size": inner,
        }
    )
    model = make_model(shape)
    writer = open_decoder(model, stop_tokens=(), slots=read.rows, recorded=True)
    writer.reserve(read.rows, read.columns)
    rows = [(slot, list(range(read.width)), read.columns - read.width) for slot in range(read.rows)]
    with torch.inference_mode():
        writer._pass_prompts(rows)
        with LiveBytes() as live:
            writer._pass_prompts(rows)
    assert live.most == pytest.approx(prompt_bytes(shape, read, width=WIDTH), rel=0.1)


@given(rows=st.integers(1, 400), columns=st.integers(1, 5000), padded=st.booleans())
def test_buffers_hold_what_is_asked_and_little_more(rows, columns, padded):
    sizes = DecoderSizes(padded=padded)
    slots, reserved = sizes.room(rows, columns)
    assert min(rows, MOST_ROWS) <= slots <= max(2 * min(rows, MOST_ROWS) - 1, 1)
    assert columns <= reserved <= max(1.5 * columns, 128)


@given(prompt=st.integers(1, 3000), answer=st.integers(1, 2000), padded=st.booleans())
def test_every_token_pass_reads_all_columns_that_it_needs(prompt, answer, padded):
    sizes, now = DecoderSizes(padded=padded), prompt
    for columns, passes in sizes.token_runs(prompt, answer):
        assert passes >= 1
        now += passes
        assert now <= columns <= sizes.columns(prompt + answer)
    assert now == prompt + answer - 1


def test_a_card_pads_what_a_processor_does_not():
    load = load_of(5, 8, 300, 300)
    card, processor = (
        sampling_bytes(SHAPE, load, width=2.0, recorded=recorded) for recorded in (True, False)
    )
    assert 1.5 < card / processor < 3
    more = load_of(80, 8, 300, 300)
    most = sampling_sizes(more, recorded=True)
    assert (most.slots, most.token_rows) == (MOST_ROWS, MOST_ROWS)


def test_answers_beyond_the_slots_take_rounds_and_no_more_memory():
    rates = default_rates()
    one, three = load_of(32, 8, 100, 50), load_of(96, 8, 100, 50)
    assert sampling_sizes(one, recorded=True) == sampling_sizes(three, recorded=True)
    seconds = [gpu_seconds(SHAPE, load, rates=rates, weight_bytes=2.0)["generation"] for load in (one, three)]
    assert seconds[1] == pytest.approx(3 * seconds[0])


def test_answers_of_a_server_take_no_memory_here():
    assert not sampling_bytes(SHAPE, load_of(5, 8, 300, 300, on_server=True), width=2.0, recorded=True)


def test_later_turns_of_an_episode_are_read_together():
    once, turns = load_of(2, 4, 100, 400), load_of(2, 4, 100, 400, has_turns=True)
    read = [
        max(sampling_sizes(load, recorded=True).prompts, key=lambda some: some.rows * some.width)
        for load in (once, turns)
    ]
    assert read == [PromptPass(2, 99, 128), PromptPass(4, 500, 512)]


def test_answers_of_a_server_take_no_time_here():
    here, there = (
        load_of(5, 8, 300, 300, on_server=is_there, reward_seconds=0.1) for is_there in (False, True)
    )
    rates = default_rates()
    for seconds in (
        lambda load: gpu_seconds(SHAPE, load, rates=rates, weight_bytes=2.0),
        lambda load: cpu_seconds(SHAPE, load, gflops=50.0),
    ):
        assert seconds(there) == {"rewards": pytest.approx(4.0)}
        assert {"reading prompts", "generation", "rewards"} <= set(seconds(here))


WINDOWED = ["mistral", "gemma2", "gemma3_text", "cohere2", "phi3"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("family", WINDOWED)
def test_models_with_windows_take_what_static_batches_take(family, recorded, monkeypatch):
    model = make_family(family)
    shape = shape_of(model.config.to_dict(), name=family)
    assert shape.remembered
    load = load_of(3, 4, 6, 20)
    held, rows = 0, set()
    forward = StaticDecoder._forward

    def see_cache(decoder, tokens, mask, cache):
        nonlocal held
        logits = forward(decoder, tokens, mask, cache)
        rows.add(len(tokens))
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        held = max(held, sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        return logits

    monkeypatch.setattr(StaticDecoder, "_forward", see_cache)
    sample(load, model, recorded=recorded)
    planned = sampling_memory(shape, load, width=WIDTH, recorded=recorded)["key-value cache"]
    assert max(rows) == batch_size(load, gpu=recorded)
    # The keys of one layer are there twice for a moment.
    assert held <= planned <= 1.3 * held


@pytest.mark.parametrize("recorded", [False, True])
def test_a_window_bounds_the_memory_of_long_answers(recorded):
    windowed = SHAPE.model_copy(update={"remembered": (16, 16)})
    sizes = [
        sampling_memory(windowed, load_of(2, 4, 8, most), width=WIDTH, recorded=recorded)["key-value cache"]
        for most in (64, 4096)
    ]
    assert sizes[0] == sizes[1]


def test_models_with_windows_are_slower_than_those_with_slots():
    windowed, load = SHAPE.model_copy(update={"remembered": (16, 0)}), load_of(8, 8, 100, 50)
    rates = default_rates()
    card = [gpu_seconds(shape, load, rates=rates, weight_bytes=2.0) for shape in (SHAPE, windowed)]
    here = [cpu_seconds(shape, load, gflops=50.0) for shape in (SHAPE, windowed)]
    # On a processor prompts are answered one by one, and each pass reads the weights.
    assert here[1]["generation"] > here[0]["generation"]
    assert here[1]["reading prompts"] == here[0]["reading prompts"]
    assert card[1]["generation"] > 10 * card[0]["generation"]
    assert card[1]["reading prompts"] == pytest.approx(8 * card[0]["reading prompts"])
