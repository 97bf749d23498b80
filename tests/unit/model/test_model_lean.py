"""Reading without learning: the lean pass gives the model's logits, and modes come back."""

import pytest
import torch
import transformers as t
from model_families import ALL, FAMILIES, SIZES, make

from graftwork.model.generate.generator import open_decoder
from graftwork.model.generate.lean import LeanPass
from graftwork.model.generate.sampling import GenerationRequest, Sampling
from graftwork.model.load import eval_mode, load_base

PROMPTS = [[5, 9, 40, 7], [8, 100, 23], list(range(20, 60)), [11, 12, 13, 14, 15, 16], [3]]
LEAN = ("llama", "qwen2", "qwen3")


def decode(model, *, lean):
    """The tokens of all answers, and the logits of one more step."""
    decoder = open_decoder(model, stop_tokens=[], slots=8)
    if not lean:
        decoder._lean = None
    requests = [GenerationRequest(prompt, Sampling(9)) for prompt in PROMPTS]
    for request in requests:
        decoder.submit(request)
    for _ in range(5):
        decoder.step()
    with torch.inference_mode():
        logits = decoder._advance(len(PROMPTS), decoder._columns, False).clone()
    return [request.result.tokens for request in requests], logits


@pytest.mark.parametrize("family", LEAN)
def test_the_lean_pass_gives_the_tokens_and_logits_of_the_model(family):
    model = make(family)
    plain, wanted = decode(model, lean=False)
    lean, logits = decode(model, lean=True)
    assert lean == plain
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", LEAN)
def test_prompts_read_side_by_side_give_the_keys_and_logits_of_the_model(family):
    model = make(family)
    shared = list(range(70, 110))
    prompts = [*PROMPTS, [*shared, 4], [*shared, 5, 6, 7]]
    read = {}
    for lean in (True, False):
        decoder = open_decoder(model, stop_tokens=[], slots=8)
        decoder._lean = decoder._lean if lean else None
        decoder.reserve(8, 64)
        rows = [(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
        with torch.inference_mode():
            decoder._pass_prompts(rows)
            behind = [(slot, [slot + 1, 9], len(prompt)) for slot, prompt in enumerate(prompts)]
            logits = decoder._pass_prompts(behind)
        held = [
            [tensor.clone() for layer in range(2) for tensor in decoder._cache.held(layer, slot, len(prompt))]
            for slot, prompt in enumerate(prompts)
        ]
        read[lean] = logits, held
    torch.testing.assert_close(read[True], read[False], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", LEAN)
def test_in_sixteen_bits_the_lean_pass_is_as_near_to_the_exact_logits_as_the_model(family):
    exact = make(family)
    model = make(family).to(torch.bfloat16)
    logits = {}
    for name, lean, which in (
        ("exact", None, exact),
        ("model", None, model),
        ("lean", LeanPass(model), model),
    ):
        decoder = open_decoder(which, stop_tokens=[], slots=8)
        decoder._lean = None
        for prompt in PROMPTS:
            decoder.submit(GenerationRequest(prompt, Sampling(9)))
        decoder.step()
        decoder._lean = lean
        decoder._tokens[: len(PROMPTS)] = torch.arange(len(PROMPTS)) + 40
        with torch.inference_mode():
            logits[name] = decoder._advance(len(PROMPTS), decoder._columns, False).float()
    off = {name: (logits[name] - logits["exact"]).abs().mean() for name in ("model", "lean")}
    assert off["lean"] < 1.2 * off["model"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", LEAN)
def test_on_a_card_the_lean_pass_gives_the_tokens_and_logits_of_the_model(family):
    model = make(family).cuda()
    found = {}
    for lean in (False, True):
        decoder = open_decoder(model, stop_tokens=[], slots=8, recorded=True)
        assert decoder._lean is not None
        decoder._lean = decoder._lean if lean else None
        requests = [GenerationRequest(prompt, Sampling(9)) for prompt in PROMPTS]
        for request in requests:
            decoder.submit(request)
        decoder.finish()
        found[lean] = [request.result.tokens for request in requests]
    assert found[True] == found[False]


@pytest.mark.parametrize("family", ALL)
def test_only_families_with_the_blocks_of_llama_take_the_lean_pass(family):
    assert (LeanPass.of(make(family)) is not None) == (family in LEAN)


def test_attention_with_a_window_and_other_numbers_than_float32_keep_the_models_own_pass():
    whole = t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=None))
    assert LeanPass.of(whole) is not None
    assert LeanPass.of(t.MistralForCausalLM(t.MistralConfig(**SIZES, sliding_window=16))) is None
    assert LeanPass.of(t.LlamaForCausalLM(FAMILIES["llama"]()).to(torch.bfloat16)) is None


def test_blocks_without_positions_and_other_activations_keep_the_models_own_pass():
    sizes = {**SIZES, "num_hidden_layers": 4}
    assert LeanPass.of(t.SmolLM3ForCausalLM(t.SmolLM3Config(**sizes, no_rope_layer_interval=4))) is None
    assert LeanPass.of(t.LlamaForCausalLM(t.LlamaConfig(**SIZES, hidden_act="relu"))) is None


def test_modes_attention_caching_and_chance_come_back(tiny_base):
    model = load_base(tiny_base)
    model.model.layers[1].train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
        model.set_attn_implementation("eager")
        model.config.use_cache = not model.config.use_cache
        caching = model.config.use_cache
        torch.rand(4)
    assert model.config.use_cache is not caching
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[1].training
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].training
    assert torch.equal(torch.get_rng_state(), before)


def test_compiled_layers_run_as_they_are_meanwhile(tiny_base):
    model = load_base(tiny_base)
    made = []

    def note(graph, _inputs):
        made.append(graph)
        return graph.forward

    model.model.layers[0].mlp.compile(backend=note, dynamic=False)
    x = torch.zeros(1, 2, 64)
    model.model.layers[0].mlp(x)
    assert len(made) == 1
    with eval_mode(model), torch.no_grad():
        for length in range(3, 6):
            model.model.layers[0].mlp(torch.zeros(1, length, 64))
    assert len(made) == 1
    model.model.layers[0].mlp(x)
    assert len(made) == 1
