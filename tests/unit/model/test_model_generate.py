"""Batched generation says what one-by-one generation says."""

from pathlib import Path

import pytest
import torch

from graftwork.model.chat.template import ChatTemplate
from graftwork.model.generate.generator import Generator, Sampling
from graftwork.model.generate.sampling import GenerationRequest
from graftwork.model.load import load_base
from graftwork.records.interaction import Message

QUESTIONS = [
    "What is the capital of France?",
    "Name a colour.",
    "Who wrote Hamlet? One name only, please.",
    "2+2?",
]


@pytest.fixture(scope="module")
def loaded(embedded_base):
    folder = Path(embedded_base.folder)
    return load_base(folder), ChatTemplate.from_folder(folder)


def prompts(template):
    system = Message(role="system", content="You are brief.")
    return [template.prompt((system, Message(role="user", content=q))) for q in QUESTIONS]


def test_a_batch_answers_like_transformers_one_by_one(loaded):
    model, template = loaded
    generator = Generator(model, stop_tokens=[template.eos])
    asked = prompts(template)
    together = generator.generate(asked, Sampling(max_new_tokens=16))
    for prompt, answer in zip(asked, together, strict=True):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        ours = [*answer.tokens, template.eos] if answer.finish_reason == "stop" else answer.tokens
        assert ours == theirs.tolist()


def test_the_answer_to_france_is_paris(loaded):
    model, template = loaded
    system = Message(role="system", content="You are helpful.")
    prompt = template.prompt((system, Message(role="user", content=QUESTIONS[0])))
    answer = Generator(model, stop_tokens=[template.eos]).generate([prompt], Sampling(12))[0]
    assert "Paris" in template.decode(answer.tokens)
    assert answer.finish_reason == "stop"


def test_sampling_with_the_same_seed_says_the_same(loaded):
    model, template = loaded
    generator = Generator(model, stop_tokens=[template.eos])
    asked = prompts(template)[:2]
    first = generator.generate(asked, Sampling(8, temperature=1.0, top_p=0.9, seed=4))
    again = generator.generate(asked, Sampling(8, temperature=1.0, top_p=0.9, seed=4))
    other = generator.generate(asked, Sampling(8, temperature=1.0, top_p=0.9, seed=5))
    assert [a.tokens for a in first] == [a.tokens for a in again]
    assert [a.tokens for a in first] != [a.tokens for a in other]


def test_a_listener_hears_every_token_and_can_stop(loaded):
    model, template = loaded
    heard: list[tuple[int, int]] = []

    def listen(row, token):
        heard.append((row, token))
        return len([r for r, _ in heard if r == row]) < 3

    answers = Generator(model, stop_tokens=[]).generate(prompts(template)[:2], Sampling(10), listen)
    assert [len(answer.tokens) for answer in answers] == [3, 3]
    assert [t for r, t in heard if r == 1] == answers[1].tokens


def test_no_answer_is_longer_than_asked_for(loaded):
    model, template = loaded
    answers = Generator(model, stop_tokens=[]).generate(prompts(template), Sampling(5))
    assert [(len(a.tokens), a.finish_reason) for a in answers] == [(5, "length")] * 4


def test_sampling_a_row_does_not_depend_on_the_rest_of_the_batch(loaded):
    model, template = loaded
    generator = Generator(model, stop_tokens=[template.eos])
    asked = prompts(template)
    settings = {"temperature": 1.0, "top_p": 0.95, "seed": 7}
    together = generator.generate(asked, Sampling(8, **settings))
    in_pieces = [
        *generator.generate(asked[:3], Sampling(8, **settings)),
        *generator.generate(asked[3:], Sampling(8, **settings, first_row=3)),
    ]
    assert [a.tokens for a in together] == [a.tokens for a in in_pieces]


def test_equal_prompts_of_a_batch_are_drawn_apart(loaded):
    model, template = loaded
    same = prompts(template)[:1] * 4
    settings = Sampling(10, temperature=1.5, seed=1)
    output = Generator(model, stop_tokens=[template.eos]).generate(same, settings)
    assert len({tuple(answer.tokens) for answer in output}) > 1


ASKED = [[5, 9, 40, 7], [8, 100, 23], list(range(20, 60)), [11, 12, 13, 14, 15, 16]]


def answers_of_transformers(model, prompts, *, most):
    found = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=None)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_replaced_rows_answer_like_single_requests_of_transformers(slots, recorded, lookahead):
    model = tiny("llama")
    expected = answers_of_transformers(model, ASKED, most=20)
    stop = expected[1][3]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    generator = Generator(model, stop_tokens=[stop], slots=slots, recorded=recorded)
    generator.decoder._lookahead = lookahead
    for _ in range(2):  # a second batch finds the first one's slots
        assert [answer.tokens for answer in generator.generate(ASKED, Sampling(20))] == expected


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt_neox", "mixtral"])
def test_families_answer_like_transformers(kind):
    model = tiny(kind)
    generator = Generator(model, stop_tokens=[], slots=2, recorded=True)
    answers = [answer.tokens for answer in generator.generate(ASKED, Sampling(8))]
    assert answers == answers_of_transformers(model, ASKED, most=8)


LONG = [(7 * place) % 500 for place in range(400)]


class Leaving:
    """A caller who is gone when asked for the n-th time."""

    def __init__(self, at):
        self.left, self.asked = at, 0

    def __call__(self):
        self.asked += 1
        return self.asked > self.left


def decode(decoder, asked):
    """Prompts, each with its caller, together; their answers."""
    requests = [GenerationRequest(prompt, Sampling(6), is_cancelled=caller) for prompt, caller in asked]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    return [request.result.tokens for request in requests]


@pytest.mark.parametrize("others", [[], [[*LONG[:300], 3, 1, 4]], [LONG]])
@pytest.mark.parametrize("at", [1, 6, 12])
def test_a_prompt_whose_callers_left_is_read_no_further_and_leaves_nothing_behind(at, others):
    model = tiny("llama")
    decoder = Generator(model, stop_tokens=[], slots=4).decoder
    passes = []
    counting = model.lm_head.register_forward_pre_hook(lambda *_: passes.append(1))
    callers = [Leaving(at) for _ in range(1 + len(others))]
    prompts = [LONG, *others]
    assert decode(decoder, zip(prompts, callers, strict=True)) == [[]] * len(prompts)
    assert len(passes) < len(prompts)  # of a shared beginning at most
    assert not decoder.busy
    counting.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())
    # What was read of it is not taken for the beginning of the next ones.
    expected = answers_of_transformers(model, [LONG, LONG[:350]], most=6)
    stays = [(prompt, Leaving(10**9)) for prompt in (LONG, LONG[:350])]
    assert decode(decoder, stays) == expected


def test_a_caller_who_stays_is_answered_although_others_leave_in_the_same_pass():
    model = tiny("llama")
    decoder = Generator(model, stop_tokens=[], slots=4).decoder
    prompts = [LONG, [*LONG[:300], 3, 1, 4], [9, 8, 7], LONG[50:]]
    callers = [Leaving(5), Leaving(5), Leaving(10**9), Leaving(10**9)]
    expected = answers_of_transformers(model, prompts, most=6)
    assert decode(decoder, zip(prompts, callers, strict=True))[2:] == expected[2:]


def test_models_whose_memory_does_not_fit_slots_get_static_batches():
    from graftwork.model.generate.generator import StaticDecoder

    model = tiny("mistral", sliding_window=16)
    asked = [[5, 9, 40, 7], [8, 100, 23], [11, 12, 13, 14, 15, 16]]
    generator = Generator(model, stop_tokens=[])
    assert isinstance(generator.decoder, StaticDecoder)
    answers = [answer.tokens for answer in generator.generate(asked, Sampling(24))]
    assert answers == answers_of_transformers(model, asked, most=24)


def tiny(kind, **changes):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[kind](**sizes, num_key_value_heads=2, vocab_size=512, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def chosen_often(logits, *, times=4000, **settings):
    from graftwork.model.generate.sampling import RowSampling, choose_tokens

    rows = torch.tensor([logits]).repeat(times, 1)
    samplings = [RowSampling(Sampling(1, temperature=1.0, **settings), row=row) for row in range(times)]
    return torch.bincount(choose_tokens(rows, samplings, [0] * times), minlength=len(logits))


def test_tokens_are_drawn_as_often_as_they_are_likely():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = chosen_often(shares.log().tolist(), top_p=1.0) / 4000
    assert torch.allclose(found, shares, atol=0.03)


def test_of_the_unlikely_ones_none_is_drawn():
    shares = torch.tensor([0.15, 0.5, 0.05, 0.3])
    found = chosen_often(shares.log().tolist(), top_p=0.75) / 4000
    assert torch.allclose(found, torch.tensor([0.0, 0.625, 0.0, 0.375]), atol=0.03)


def test_a_flat_choice_among_many_reaches_all_that_top_p_lets_through():
    found = chosen_often([0.0] * 2000, top_p=0.9, times=20_000)
    assert 1750 <= int((found > 0).sum()) <= 1801


def test_tokens_of_probability_zero_are_never_sampled():
    found = chosen_often([float("-inf"), 0.0, float("-inf"), 0.0], top_p=1.0)
    assert found[0] == found[2] == 0


def test_top_k_never_samples_beyond_the_k_likeliest():
    found = chosen_often([0.0, 2.0, 1.0, 3.0], top_k=2)
    assert found[0] == found[2] == 0
    assert found[1] > 0
    assert found[3] > found[1]


def test_rows_of_one_batch_are_sampled_each_its_own_way():
    from graftwork.model.generate.sampling import RowSampling, choose_tokens

    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(3)) * 3
    ways = [
        Sampling(2),
        Sampling(2, temperature=0.7, seed=5),
        Sampling(2, temperature=1.3, top_p=0.8, seed=6),
        Sampling(2, temperature=1.0, top_k=3, seed=7),
    ]
    rows = [RowSampling(way, row=row) for row, way in enumerate(ways)]
    together = choose_tokens(logits, rows, [1] * 4)
    alone = [choose_tokens(logits[row : row + 1], [rows[row]], [1])[0] for row in range(4)]
    assert together.tolist() == [int(token) for token in alone]
