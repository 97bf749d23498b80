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
    model, template = loaded
    # No token ends an answer: a pass over the row that is left would be another size.
    recorded, walked = (Generator(model, stop_tokens=[-1], recorded=some) for some in (True, False))
    asked = prompts(template)
    # The pass over prompts is recorded when its size comes a second time.
    for _ in range(2):
        recorded.generate(asked[:2], Sampling(24))
    first = set(recorded.decoder._recorder._recordings)
    assert first
    mine = recorded.generate(asked[2:], Sampling(24))
    assert set(recorded.decoder._recorder._recordings) == first
    assert [a.tokens for a in mine] == [a.tokens for a in walked.generate(asked[2:], Sampling(24))]


def test_rows_that_replace_ended_ones_say_the_same(loaded):
    model, template = loaded
    asked = prompts(template) * 3
    few = Generator(model, stop_tokens=[template.eos], recorded=True, slots=3)
    expected = Generator(model, stop_tokens=[template.eos]).generate(asked, Sampling(20))
    assert few.generate(asked, Sampling(20)) == expected


def test_adapters_of_a_recorded_batch_say_what_each_says_alone():
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.lora import LoraLinear
    from graftwork.model.adapters.peft import activate, attach
    from graftwork.model.generate.sampling import GenerationRequest

    model = tiny("llama").requires_grad_(False)
    for seed, name in enumerate(("first", "second")):
        shape = AdapterShape(rank=4, alpha=16, targets=("q_proj", "down_proj"), layers=(0, 1))
        attach(model, shape, name=name, seed=seed)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            for name in ("first", "second"):
                module.lora_B[name].data.normal_(std=0.3)
    names = [None, "first", "second", "first"]
    asked = [[5, 9, 40, 7], [8, 100, 23], [11, 12, 13, 14, 15, 16], [3, 4]]
    expected = []
    for prompt, name in zip(asked, names, strict=True):
        activate(model, name)
        expected.append(Generator(model, stop_tokens=[-1]).generate([prompt], Sampling(16))[0].tokens)
    activate(model, None)
    decoder = Generator(model, stop_tokens=[-1], recorded=True, slots=2).decoder
    requests = [
        GenerationRequest(prompt, Sampling(16), adapter=name)
        for prompt, name in zip(asked, names, strict=True)
    ]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    assert [request.result.tokens for request in requests] == expected


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
