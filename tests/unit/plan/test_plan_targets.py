"""What is to be learned is resolved from the base's own layer names, before anything is loaded."""

import pytest

from graftwork.model.adapter_shape import AdapterShape
from graftwork.pipeline.steps.plan import describe_adapter
from graftwork.records.errors import UserError
from graftwork.records.plan import ModelShape
from graftwork.train.settings import TrainSettings

LLAMA = ModelShape(
    name="llama",
    hidden_size=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=300,
    tied_embeddings=True,
    max_positions=128,
)
NEOX = LLAMA.model_copy(update={"linears": {"query_key_value": (64, 192), "dense": (64, 64)}})


def resolve(shape=LLAMA, **settings):
    return AdapterShape.model_validate(describe_adapter(TrainSettings.model_validate(settings), shape))


def test_all_means_every_linear_layer_of_the_base_at_hand():
    assert resolve().targets == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    assert resolve(NEOX).targets == ("query_key_value", "dense")


def test_settings_become_a_shape():
    made = resolve(
        rank=4,
        alpha=10,
        use_rslora=True,
        method="dora",
        upper_layers=2,
        modules={"q_proj": {"rank": 2}, "up_proj": {"alpha": 3}},
    )
    assert (made.kind, made.layers, made.use_rslora) == ("dora", (2, 3), True)
    assert (made.ranks, made.alphas) == ({"q_proj": 2}, {"up_proj": 3.0})
    assert made.scale_of("model.layers.3.self_attn.q_proj") == pytest.approx(10 / 2**0.5)
    assert made.scale_of("model.layers.3.mlp.up_proj") == pytest.approx(3 / 4**0.5)
    assert resolve(method="qlora").kind == "lora"
    assert resolve(method="full").kind == "full"


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"target_modules": ["q_prj"]}, "did you mean 'q_proj'?"),
        ({"target_modules": ["q_proj"], "modules": {"k_proj": {"rank": 2}}}, "did you mean 'q_proj'?"),
        ({"target_modules": ["zzz"]}, "set `train.target_modules` to names of its linear layers"),
    ],
)
def test_a_name_that_no_layer_has_is_refused_with_the_nearest(settings, hint):
    with pytest.raises(UserError, match="no layer of the model") as caught:
        resolve(**settings)
    assert caught.value.fix == hint
