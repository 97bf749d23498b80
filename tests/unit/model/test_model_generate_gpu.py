"""A recorded step on a card says what the step says that is launched piece by piece. Needs a GPU."""

from pathlib import Path

import pytest
import torch

from graftwork.model.chat.template import ChatTemplate
from graftwork.model.generate.generator import Generator, Sampling
from graftwork.model.load import load_base
from graftwork.records.interaction import Message

pytestmark = pytest.mark.gpu
QUESTIONS = ["What is the capital of France?", "Name a colour.", "Who wrote Hamlet? One name only.", "2+2?"]


@pytest.fixture(scope="module")
def loaded(embedded_base):
    folder = Path(embedded_base.folder)
    return load_base(folder, dtype="float32", device="cuda"), ChatTemplate.from_folder(folder)


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
    settings, asked = Sampling(12, temperature=0.8, top_p=0.9, seed=3), prompts(loaded[1])
    mine, theirs = recorded.generate(asked, settings), walked.generate(asked, settings)
    assert [a.tokens for a in mine] == [a.tokens for a in theirs]


def tiny(kind, **changes):
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[kind](**sizes, num_key_value_heads=2, vocab_size=512, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).cuda().eval()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attn_implementation": "eager"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("qwen3_moe", {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 4}),
        ("mistral", {"sliding_window": 16}),
    ],
)
def test_families_that_cannot_be_recorded_are_walked(kind, changes):
    model = tiny(kind, **changes)
    asked = [[5, 9, 40, 7], [8, 100, 23], [11, 12, 13, 14, 15, 16]]
    mine = Generator(model, stop_tokens=[-1], recorded=True).generate(asked, Sampling(24))
    theirs = Generator(model, stop_tokens=[-1]).generate(asked, Sampling(24))
    assert [a.tokens for a in mine] == [a.tokens for a in theirs]
