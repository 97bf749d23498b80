"""The slot scheduler, cancelled requests, and adapters of their own for the rows of a batch."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.lora import LoraLinear
from graftwork.model.adapters.peft import activate, attach
from graftwork.model.generate.generator import Generator, open_decoder
from graftwork.model.generate.sampling import GenerationRequest, Sampling
from graftwork.model.generate.scheduler import SlotScheduler

PROMPTS = [[5, 9, 40, 7], [8, 100, 23], list(range(20, 60)), [11, 12, 13, 14, 15, 16]]


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    return model.requires_grad_(False)


def make_adapted_model(kind="lora"):
    model = make_model()
    for seed, (name, rank) in enumerate((("first", 4), ("second", 8))):
        shape = AdapterShape(
            rank=rank, alpha=4 * rank, targets=("q_proj", "v_proj", "down_proj"), layers=(0, 1), kind=kind
        )
        attach(model, shape, name=name, seed=seed)
    for at, module in enumerate(module for module in model.modules() if isinstance(module, LoraLinear)):
        for number, name in enumerate(("first", "second")):
            chance = torch.Generator().manual_seed(10 * at + number)
            module.lora_B[name].data.normal_(std=0.3, generator=chance)
    activate(model, None)
    return model


def has_id(number, request):
    return request.id == number


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 1)),
        st.tuples(st.just("admit"), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("compact"), st.integers(0, 5)),
    ),
    max_size=60,
)


@given(st.integers(1, 5), actions)
def test_every_request_runs_once_in_order_and_never_with_another_group(slots, steps):
    scheduler = SlotScheduler(slots, group_of=lambda request: request.group)
    submitted, cancelled, admitted = [], set(), []
    running = {}
    for action, number in steps:
        if action == "submit":
            submitted.append(SimpleNamespace(id=len(submitted), group=number))
            scheduler.submit(submitted[-1])
        elif action == "admit":
            for slot, request in scheduler.admit():
                assert slot not in running
                running[slot] = request
                admitted.append(request.id)
        elif action == "end" and number in running:
            scheduler.release(number)
            del running[number]
        elif action == "cancel":
            unwanted = scheduler.drop_waiting(partial(has_id, number))
            cancelled |= {request.id for request in unwanted}
        elif action == "compact":
            for source, target in scheduler.compact(to=number):
                assert target < source
                assert target not in running
                running[target] = running.pop(source)
            assert scheduler.used <= max(number, len(running))
        assert {slot: row for slot, row in enumerate(scheduler.rows) if row is not None} == running
        assert len(running) == scheduler.running <= slots
        assert len({request.group for request in running.values()}) <= 1
        assert admitted == sorted(set(admitted))
        assert not cancelled & set(admitted)
    # Whatever is left comes to its turn.
    while scheduler.waiting or scheduler.running:
        admitted += [request.id for _, request in scheduler.admit()]
        for slot, row in enumerate(scheduler.rows):
            if row is not None:
                scheduler.release(slot)
    assert sorted([*admitted, *cancelled]) == list(range(len(submitted)))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_cancelled_request_frees_its_slot_for_the_next(recorded):
    model = make_model()
    expected = Generator(model, stop_tokens=[]).generate(PROMPTS[2:3], Sampling(6))[0].tokens
    decoder = open_decoder(model, stop_tokens=[], slots=1, recorded=recorded)
    left = False
    long = GenerationRequest(PROMPTS[0], Sampling(500), on_token=lambda _token: not left)
    given_up = GenerationRequest(PROMPTS[1], Sampling(500), is_cancelled=lambda: left)
    after = GenerationRequest(PROMPTS[2], Sampling(6))
    for request in (long, given_up, after):
        decoder.submit(request)
    for _ in range(3):
        decoder.step()
    assert not after.result.tokens
    left = True
    steps = 0
    while decoder.busy:
        decoder.step()
        steps += 1
    assert steps < 12
    assert given_up.done
    assert given_up.result.tokens == []
    assert after.result.tokens == expected
    assert (decoder.running, decoder.waiting) == (0, 0)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("slots", [2, 8])
@pytest.mark.parametrize("recorded", [False, True])
def test_rows_with_adapters_of_their_own_answer_as_each_would_alone(kind, slots, recorded):
    model = make_adapted_model(kind)
    names = [None, "first", "second", "first"]
    expected = []
    for prompt, name in zip(PROMPTS, names, strict=True):
        activate(model, name)
        expected.append(Generator(model, stop_tokens=[]).generate([prompt], Sampling(10))[0].tokens)
    activate(model, None)
    assert expected[1] != Generator(model, stop_tokens=[]).generate(PROMPTS[1:2], Sampling(10))[0].tokens
    decoder = open_decoder(model, stop_tokens=[], slots=slots, recorded=recorded)
    decoder._recorder.enabled = False
    requests = [
        GenerationRequest(prompt, Sampling(10), adapter=name)
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    assert [request.result.tokens for request in requests] == expected
    # Others that use the model afterwards find it as they left it.
    assert all(m.row_change is None for m in model.modules() if isinstance(m, LoraLinear))


def test_a_prompt_takes_its_beginning_from_another_slot():
    model = make_model()
    shared = list(range(30, 70))
    decoder = open_decoder(model, stop_tokens=[], slots=3)
    first = GenerationRequest([*shared, 7], Sampling(12))
    decoder.submit(first)
    decoder.step()
    passes = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _module, arguments: passes.append(arguments[0].numel())
    )
    second = GenerationRequest([*shared, 9, 4], Sampling(5))
    decoder.submit(second)
    decoder.finish()
    assert passes[0] == 2
    for request in (first, second):
        alone = Generator(model, stop_tokens=[]).generate([request.prompt], Sampling(request.most))[0]
        assert request.result.tokens == alone.tokens


def test_a_cache_grows_under_running_requests():
    model = make_model()
    decoder = open_decoder(model, stop_tokens=[], slots=2, recorded=True)
    long = GenerationRequest(PROMPTS[0], Sampling(300))
    decoder.submit(long)
    for _ in range(100):
        decoder.step()
    short = GenerationRequest(PROMPTS[1], Sampling(10))
    decoder.submit(short)
    decoder.finish()
    for request in (long, short):
        alone = Generator(model, stop_tokens=[]).generate([request.prompt], Sampling(request.most))[0]
        assert request.result.tokens == alone.tokens


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_that_training_changes_in_place_act_in_the_next_batch(kind):
    model, names = make_adapted_model(kind), [None, "first", "second", "first"]
    decoder = open_decoder(model, stop_tokens=[], slots=4)

    def answer(decoder):
        requests = [
            GenerationRequest(prompt, Sampling(10), adapter=name)
            for prompt, name in zip(PROMPTS, names, strict=False)
        ]
        for request in requests:
            decoder.submit(request)
        decoder.finish()
        return [request.result.tokens for request in requests]

    before = answer(decoder)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                for b in module.lora_B.values():
                    b.mul_(-3)
    decoder.update_adapters()
    after = answer(decoder)
    assert after == answer(open_decoder(model, stop_tokens=[], slots=4)) != before


def test_prompts_of_several_groups_are_each_read_once():
    model = make_model()
    prompts = [prompt for prompt in PROMPTS[:3] for _ in range(4)]
    decoder = open_decoder(model, stop_tokens=[], slots=12)
    passes = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _module, arguments: passes.append(arguments[0].numel())
    )
    requests = [
        GenerationRequest(prompt, Sampling(6, temperature=1.0, seed=at)) for at, prompt in enumerate(prompts)
    ]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    assert passes[:2] == [sum(map(len, PROMPTS[:3])) - 3, 12]
    for request in requests:
        alone = Generator(model, stop_tokens=[]).generate([request.prompt], request.sampling.sampling)[0]
        assert request.result.tokens == alone.tokens
