"""Batched generation says what one-by-one generation says."""

from pathlib import Path

import pytest
import torch

from graftwork.model.chat.template import ChatTemplate
from graftwork.model.generate.generator import Generator, Sampling
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


def test_the_step_that_cards_record_gives_the_scores_of_the_step_that_is_walked(loaded):
    from graftwork.model.generate.recorded import RecordedDecoder

    model, template = loaded
    generator = Generator(model, stop_tokens=[template.eos])
    asked = prompts(template)
    with torch.inference_mode():
        walked, given = generator._prefill(asked), generator._prefill(asked)
        columns = given.mask.shape[1] + 8
        decoder = RecordedDecoder(model, given.cache, rows=len(asked), columns=columns)
        decoder.fill(given.cache, given.mask)
        mask, scores = walked.mask, walked.logits
        for _ in range(4):
            chosen = scores.argmax(dim=-1)
            mask = torch.cat([mask, mask.new_ones(len(asked), 1)], dim=1)
            scores = generator._forward(chosen[:, None], mask, walked.cache)
            assert torch.allclose(decoder.step(chosen), scores, atol=1e-3)


def test_only_what_a_recording_can_hold_is_recorded(loaded):
    from types import SimpleNamespace

    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    from graftwork.model.generate.attention import ATTENTION_NAME
    from graftwork.model.generate.recorded import can_record

    def a_model(attention, device):
        weight = SimpleNamespace(device=torch.device(device))
        config = SimpleNamespace(_attn_implementation=attention)
        return SimpleNamespace(config=config, parameters=lambda: iter([weight]))

    whole, sliding = DynamicCache(), DynamicCache()
    whole.layers = [DynamicLayer(), DynamicLayer()]
    sliding.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=8)]
    assert can_record(a_model(ATTENTION_NAME, "cuda"), whole)
    assert not can_record(a_model(ATTENTION_NAME, "cpu"), whole)
    assert not can_record(a_model(ATTENTION_NAME, "cuda"), sliding)
    # Others add a mask of booleans to the scores instead of masking by it.
    assert not can_record(a_model("eager", "cuda"), whole)


def test_a_step_that_cannot_be_recorded_is_walked(loaded, monkeypatch):
    from graftwork.model.generate import generator

    model, template = loaded
    walked = Generator(model, stop_tokens=[template.eos]).generate(prompts(template), Sampling(6))

    def refuse(*_arguments, **_named):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(generator, "can_record", lambda *_: True)
    monkeypatch.setattr(generator, "RecordedDecoder", refuse)
    generator = Generator(model, stop_tokens=[template.eos], recorded=True)
    for _ in range(2):
        answers = generator.generate(prompts(template), Sampling(6))
        assert [a.tokens for a in answers] == [a.tokens for a in walked]


def chosen_often(logits, *, top_p, times=4000):
    from graftwork.model.generate.generator import TokenSampler

    rows = torch.tensor([logits]).repeat(times, 1)
    chooser = TokenSampler(Sampling(1, temperature=1.0, top_p=top_p), rows=times)
    chosen = chooser.choose(rows, rows=list(range(times)), step=0)
    return torch.bincount(chosen, minlength=len(logits))


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
