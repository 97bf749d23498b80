"""A recorded step on a card says what the step says that is launched piece by piece. Needs a GPU."""

from pathlib import Path

import pytest
import torch

from graftwork.model.generate import Generator, Sampling
from graftwork.model.load import load_base
from graftwork.model.template import Template
from graftwork.records.interaction import Message

pytestmark = pytest.mark.gpu
QUESTIONS = ["What is the capital of France?", "Name a colour.", "Who wrote Hamlet? One name only.", "2+2?"]


@pytest.fixture(scope="module")
def loaded(embedded_base):
    folder = Path(embedded_base.folder)
    return load_base(folder, dtype="float32", device="cuda"), Template.from_folder(folder)


def prompts(template):
    return [template.prompt((Message(role="user", content=q),)) for q in QUESTIONS]


def both(loaded):
    model, template = loaded
    stop = [template.eos]
    return Generator(model, stop_tokens=stop, recorded=True), Generator(model, stop_tokens=stop)


def test_recorded_and_not_say_the_same(loaded):
    recorded, walked = both(loaded)
    asked = prompts(loaded[1])
    for rows in (1, 4, 3):
        mine = recorded.generate(asked[:rows], Sampling(40))
        theirs = walked.generate(asked[:rows], Sampling(40))
        assert [(a.tokens, a.finish_reason) for a in mine] == [(a.tokens, a.finish_reason) for a in theirs]


def test_a_recording_is_used_again_for_other_prompts_of_the_size(loaded):
    recorded, walked = both(loaded)
    asked = prompts(loaded[1])
    recorded.generate(asked[:2], Sampling(24))
    first = recorded._decoder
    mine = recorded.generate(asked[2:], Sampling(24))
    assert recorded._decoder is first
    assert [a.tokens for a in mine] == [a.tokens for a in walked.generate(asked[2:], Sampling(24))]


def test_sampling_with_a_seed_says_the_same_recorded_and_not(loaded):
    recorded, walked = both(loaded)
    settings = Sampling(12, temperature=0.8, top_p=0.9, seed=3)
    asked = prompts(loaded[1])[:1]
    assert recorded.generate(asked, settings)[0].tokens == walked.generate(asked, settings)[0].tokens


def test_scores_agree_to_rounding(loaded):
    recorded, walked = both(loaded)
    asked = prompts(loaded[1])
    with torch.inference_mode():
        read = walked._prefill(asked)
        chosen = read.logits.argmax(dim=-1)
        decoder = recorded._filled_decoder(recorded._prefill(asked), columns=read.mask.shape[1] + 8)
        mask = torch.cat([read.mask, read.mask.new_ones(len(asked), 1)], dim=1)
        expected = walked._forward(chosen[:, None], mask, read.cache)
        assert torch.allclose(decoder.step(chosen), expected, atol=1e-3)
