"""The count of our own step follows its code: a small step is run for real, every tensor watched.

A change of what the written-out step holds on to, and when, must change `model/step_*.py` too.
"""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)

from graftwork.costmodel.gpu_step import step_recipe, take_pass
from graftwork.costmodel.gpu_tensors import ByteTally
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.parts import block_linears
from graftwork.model.shape import adapter_parameters, linear_names, linear_sizes, shape_of
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.records.plan import ModelShape, Tuning
from graftwork.train.gpu.engine import GpuEngine
from graftwork.train.gpu.load import load_quantized
from graftwork.train.settings import TrainSettings

LAYERS, TOKENS, RANK = 3, 256, 8
SHAPE = ModelShape(
    name="watched",
    hidden_size=256,
    layers=LAYERS,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    vocab_size=2048,
    tied_embeddings=False,
    max_positions=512,
)
BESIDE = {Qwen2Config: 256 + 2 * 128, Qwen3Config: 2 * 64, Olmo2Config: 256 + 128}
"""Parameters of a block beyond Llama's."""


BY_FAMILY = (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    Olmo2Config,
    Phi3Config,
    SmolLM3Config,
    Starcoder2Config,
)
"""Counted by the layout of their family."""


class Watch(TorchDispatchMode):
    """Bytes of all tensors that are alive, each storage once, and their peak."""

    def __init__(self):
        super().__init__()
        self.tally, self.sizes = ByteTally(), {}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        del types
        out = function(*arguments, **(named or {}))
        given = {_storage(leaf) for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)}
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and (key := _storage(tensor)) not in given | self.sizes.keys()
            ):
                storage = tensor.untyped_storage()
                self.sizes[key] = self.tally.alloc(storage.nbytes())
                weakref.finalize(storage, self._let_go, key)
        return out

    def _let_go(self, key):
        self.tally.free(self.sizes.pop(key))


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def make_tuning(form, keep, lean, *, chunk=128, head=64):
    return Tuning(
        form=form,
        head="whole",
        micro_tokens=TOKENS,
        longest=TOKENS,
        keep=keep,
        lean=lean,
        chunk_tokens=chunk,
        head_tokens=head,
        turned=False,
        host_embedding=False,
        compiled=False,
        limit_gib=8.0,
        peak_gib=0.0,
        seconds_per_token=0.0,
    )


def make_config(config):
    named = config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if config is MistralConfig:
        named.sliding_window = None
    if config is GraniteConfig:
        named.residual_multiplier = 0.22
    return named


def watched_peak(config, tuning):
    """The most that one pass holds beyond what stands: the second pass, whose gradients are added."""
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(make_config(config), dtype=torch.bfloat16)
        .eval()
        .requires_grad_(False)
    )
    frozen = load_quantized(model, tuning, device="cpu")
    adapter = AdapterShape(rank=RANK, alpha=8, targets=targets_of(model), layers=tuple(range(LAYERS)))
    learned = attach(model, adapter, seed=1)
    settings = TrainSettings(rank=RANK, alpha=8)
    engine = GpuEngine(model, learned, settings=settings, frozen=frozen, tuning=tuning, shape=SHAPE)
    message = (Message(role="user", content="x"),)
    row = Row(
        id="1",
        origin=Origin(file="log.jsonl", line=1),
        messages=message,
        reply="y",
        tokens=tuple(at % 2048 for at in range(TOKENS)),
        trained_from=1,
    )
    engine.settle([row])
    engine.backward([row])
    engine.apply(1e-4)
    with Watch() as watch:
        engine.backward([row])
    return watch.tally.most


def targets_of(model):
    return tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for _, path, _ in block_linears(model)))


def counted_peak(config, tuning):
    plain = sum(a * b for a, b in linear_sizes(SHAPE).values()) + 2 * SHAPE.hidden_size
    shape = SHAPE.model_copy(update={"block_parameters": plain + BESIDE.get(config, 0)})
    if config in BY_FAMILY:
        shape = shape_of(make_config(config).to_dict(), name="watched")
    trainable = adapter_parameters(shape, rank=RANK, targets=linear_names(shape), layers=LAYERS)
    tally = ByteTally()
    walk = step_recipe(shape, tuning, trainable=trainable, adapted=LAYERS, places=TOKENS - 1)
    take_pass(tally, walk, keep_gradients=False)
    return tally.most


@pytest.mark.parametrize(
    ("config", "form", "keep", "lean"),
    [
        (LlamaConfig, "whole", 0, 0),
        (LlamaConfig, "whole", 3, 0),
        (LlamaConfig, "whole", 0, 3),
        (LlamaConfig, "four", 1, 1),
        (MistralConfig, "four", 0, 0),
        (Qwen2Config, "whole", 1, 1),
        (Qwen3Config, "whole", 1, 1),
        (Qwen3Config, "whole", 0, 0),
        (Olmo2Config, "whole", 1, 1),
        (Olmo2Config, "whole", 0, 0),
        *[(config, "whole", 1, at % 2) for at, config in enumerate(BY_FAMILY)],
    ],
)
def test_the_count_of_a_pass_is_what_the_pass_holds(config, form, keep, lean):
    tuning = make_tuning(form, keep, lean)
    assert counted_peak(config, tuning) == pytest.approx(watched_peak(config, tuning), rel=0.01)


@pytest.mark.parametrize(("chunk", "head"), [(32, 64), (256, 256)])
def test_many_chunks_are_counted_as_few_and_few_as_many(chunk, head):
    tuning = make_tuning("whole", 0, 1, chunk=chunk, head=head)
    assert counted_peak(LlamaConfig, tuning) == pytest.approx(watched_peak(LlamaConfig, tuning), rel=0.01)
