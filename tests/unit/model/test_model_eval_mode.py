"""A borrowed model comes back as it was, and compiled layers do not compile again for every token."""

import torch

from graftwork.model.load import eval_mode, load_base


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
