"""The processor's step: its gradient, the cache of the trunk, and where it is taken."""

import pytest
import torch
from cpu_rows import make_rows
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.blocks import has_onednn_products
from graftwork.model.load import load_base
from graftwork.model.shape import shape_of
from graftwork.plan.catalog.hardware import find_cpu, find_gpu
from graftwork.plan.catalog.models import list_models
from graftwork.plan.fit.question import half_precision, kind_of, make_question, why_plain
from graftwork.plan.fit.search import takes_own_step
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitOptions
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.cpu.step import (
    CpuStep,
    FileCache,
    FrozenLayers,
    HiddenStateCache,
    MemoryCache,
    first_trained_block,
    layout_tokens,
    make_cpu_step,
    number_rows,
    shared_prefix,
)
from graftwork.train.engine import StepOptions, TrainingEngine
from graftwork.train.engine_choice import choose_precision, why_plain_step
from graftwork.train.loop import RunContext, TrainingLoop
from graftwork.train.loss import TokenBatch, summed_loss, weighted_loss
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import TrainSettings

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=64),
}
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(config, *, layers=(2, 3), targets=EVERY, kind="lora"):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.requires_grad_(False)
    shape = AdapterShape(rank=3, alpha=6, targets=targets, layers=layers, kind=kind)
    parameters = attach(model, shape, seed=1)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, parameters


def gradients(loss, parameters):
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    return float(loss.detach()), [parameter.grad.clone() for parameter in parameters]


def assert_same(model, parameters, rows, *, packed=True):
    batch = TokenBatch(rows, device="cpu")
    way = CpuStep(model, first_trained_block(model), rows, states=HiddenStateCache(), packed=packed)
    ours = gradients(weighted_loss(way.logits(batch), batch.targets, None), parameters)
    theirs = gradients(summed_loss(model, batch), parameters)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6 * max(float(other.abs().max()), 1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [0, 12])
def test_each_known_family_gets_the_loss_and_the_gradient_of_the_plain_way(family, shared):
    model, parameters = make_model(FAMILIES[family])
    assert_same(model, parameters, make_rows(shared=shared))


@pytest.mark.parametrize(
    "choice",
    [
        {"layers": (0, 1, 2, 3)},
        {"layers": (3,)},
        {"layers": (1, 3)},
        {"targets": ("q_proj", "down_proj")},
        {"targets": ("v_proj",), "layers": (2,)},
        {"kind": "dora"},
    ],
    ids=str,
)
def test_whatever_is_adapted_the_gradient_is_the_same(choice):
    model, parameters = make_model(FAMILIES["llama"], **choice)
    assert_same(model, parameters, make_rows(shared=12))


def test_without_packed_weights_the_gradient_is_the_same():
    model, parameters = make_model(FAMILIES["qwen3"])
    assert_same(model, parameters, make_rows(shared=12), packed=False)


def test_one_row_alone_and_a_reply_of_one_token_are_read_too():
    model, parameters = make_model(FAMILIES["llama"])
    row = make_rows(1)[0]
    short = row.model_copy(update={"tokens": row.tokens[: row.trained_from + 1]})
    assert_same(model, parameters, [short])


def test_weights_are_packed_on_this_machine():
    assert has_onednn_products()


def test_nothing_is_kept_for_a_gradient_below_the_first_adapted_block():
    model, _ = make_model(FAMILIES["llama"])
    rows = make_rows(shared=12)
    way = CpuStep(model, 2, rows, states=HiddenStateCache(), packed=True)
    entering = way._enter(rows, layout_tokens(rows))
    assert not entering.requires_grad
    assert entering.grad_fn is None


def test_the_last_token_of_a_row_is_not_read():
    rows = make_rows(shared=12)
    layout = layout_tokens(rows)
    assert layout.shared == 12
    assert layout.shared + sum(layout.rests) == 12 + sum(len(row.tokens) - 13 for row in rows)


def test_the_choice_says_where_the_trunk_is_kept_and_why(tmp_path):
    model, _ = make_model(FAMILIES["llama"])
    rows = make_rows(shared=12)
    settings = TrainSettings(epochs=3, batch_size=2)
    shape = shape_of(model.config.to_dict(), name="small")
    _, word = make_cpu_step(model, rows, settings=settings, shape=shape, folder=tmp_path)
    assert "in memory" in word
    once = TrainSettings(epochs=1)
    _, word = make_cpu_step(model, rows, settings=once, shape=shape, folder=tmp_path)
    assert "not cached: no row is seen twice" in word


SETTINGS = TrainSettings(
    rank=4, alpha=8, epochs=3, batch_size=4, learning_rate=5e-2, checkpoint_every=3, threads=1
)
SHAPE = AdapterShape(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), layers=(1,))


class Killed(BaseException):
    """Stands in for kill -9: nothing in the program catches it."""


class Before(TrainingCallback):
    """Calls back before each step."""

    def __init__(self, call):
        self._call = call

    def on_step_begin(self, number, steps):
        self._call(number, steps)


def rows_with_beginning():
    return make_rows(16, shared=30)


def places(rows, folder):
    skipped = len(shared_prefix(rows)) + 1
    lengths = tuple(len(tokens) - skipped for tokens in number_rows(rows))
    return {
        "nowhere": HiddenStateCache(),
        "memory": MemoryCache(),
        "file": FileCache(folder, lengths=lengths, width=64, dtype=torch.float32),
    }


def make_loop(tiny_base, folder, states, *, before=None):
    torch.set_num_threads(1)
    rows = rows_with_beginning()
    model = load_base(tiny_base)
    parameters = attach(model, SHAPE, seed=SETTINGS.seed)
    way = CpuStep(model, 1, rows, states=states, packed=True)
    engine = TrainingEngine(model, parameters, settings=SETTINGS, step=StepOptions(logits=way.logits))
    callbacks = [Before(before)] if before else []
    return TrainingLoop(
        engine, EpochOrder(rows, settings=SETTINGS), RunContext(SETTINGS, folder), callbacks=callbacks
    )


def run(tiny_base, folder, states):
    loop = make_loop(tiny_base, folder, states)
    loop.run()
    return loop._engine.digest(), [step.loss for step in read_steps(folder)]


@pytest.mark.parametrize("place", ["memory", "file"])
def test_with_and_without_the_cache_a_run_ends_in_the_same_bytes(tiny_base, tmp_path, place):
    states = places(rows_with_beginning(), tmp_path)[place]
    assert run(tiny_base, tmp_path / "kept", states) == run(tiny_base, tmp_path / "not", HiddenStateCache())


@pytest.mark.parametrize("killed_before", [3, 6, 8, 11])
def test_a_resumed_run_whose_cache_is_cold_ends_in_the_same_bytes(tiny_base, tmp_path, killed_before):
    whole = run(tiny_base, tmp_path / "whole", MemoryCache())

    def die(step, _steps):
        if step == killed_before:
            raise Killed

    with pytest.raises(Killed):
        make_loop(tiny_base, tmp_path / "cut", MemoryCache(), before=die).run()
    assert run(tiny_base, tmp_path / "cut", MemoryCache()) == whole


def test_the_states_of_a_row_are_a_function_of_the_row_alone(tiny_base):
    torch.set_num_threads(1)
    model, rows = load_base(tiny_base), rows_with_beginning()
    forwards = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    backwards = FrozenLayers(model.model, 1, rows, states=HiddenStateCache(), packed=True)
    first = [forwards.read(row) for row in rows]
    again = [forwards.read(row) for row in rows]
    other = [backwards.read(row) for row in reversed(rows)][::-1]
    for one, two, three in zip(first, again, other, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_the_states_are_what_transformers_passes_to_that_block(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    for row in rows[:3]:
        hidden = model.model(torch.tensor([row.tokens[:-1]]), output_hidden_states=True).hidden_states[1]
        assert torch.allclose(trunk.read(row), hidden[0], atol=1e-5)


def test_a_row_that_the_run_does_not_know_is_read_all_the_same(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, rows, states=MemoryCache(), packed=True)
    stranger = make_rows(1, shared=0)[0]
    hidden = model.model(torch.tensor([stranger.tokens[:-1]]), output_hidden_states=True).hidden_states[1]
    assert torch.allclose(trunk.read(stranger), hidden[0], atol=1e-5)


def test_each_row_is_computed_once_however_often_it_is_asked_for(tiny_base):
    model, rows = load_base(tiny_base), rows_with_beginning()
    trunk = FrozenLayers(model.model, 1, [*rows, rows[0]], states=MemoryCache(), packed=False)
    passes = []
    through = trunk._pass
    trunk._pass = lambda tokens, before: passes.append(tokens) or through(tokens, before)
    for _ in range(3):
        for row in rows:
            trunk.read(row)
    assert len(passes) == len(rows) + 1  # and the beginning


def test_the_file_leaves_nothing_behind(tmp_path):
    states = FileCache(tmp_path, lengths=(2, 3), width=4, dtype=torch.float32)
    assert states.get(1) is None
    states.put(1, torch.full((3, 4), 7.0))
    assert torch.equal(states.get(1), torch.full((3, 4), 7.0))
    assert states.get(0) is None
    assert list(tmp_path.iterdir()) == []


MACHINES = {
    "cpu": Machine(gpu=None, ram_gib=64.0, cpu=find_cpu("5950X")),
    "new GPU": Machine(gpu=find_gpu("H100 SXM"), gpus=1, ram_gib=64.0, cpu=find_cpu("5950X")),
    "old GPU": Machine(gpu=find_gpu("T4"), gpus=1, ram_gib=64.0, cpu=find_cpu("5950X")),
}


@pytest.mark.parametrize("where", MACHINES)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("model", list_models(), ids=lambda model: model.name)
def test_a_fit_is_of_the_step_that_training_takes(model, method, where):
    machine = MACHINES[where]
    question = make_question(model, FitOptions(method=method), machine=machine)
    capability = None if machine.gpu is None else machine.gpu.capability
    precision = choose_precision("auto", kind=kind_of(question), capability=capability)
    assert precision == half_precision(question)
    trained = why_plain_step(
        TrainSettings(method=method),
        model.shape,
        device=kind_of(question),
        precision=precision,
        capability=capability,
    )
    assert why_plain(question) == trained
    assert takes_own_step(question) == (trained is None and where != "cpu")


@pytest.mark.parametrize(
    ("device", "changes", "why"),
    [
        ("cuda", {"packing": "off"}, "packing is off"),
        ("cuda", {"strategy": "ddp", "processes": 2}, "several devices"),
        ("cpu", {"strategy": "ddp", "processes": 2}, "several devices"),
        ("cpu", {"gradient_checkpointing": "on"}, "checkpoints activations"),
        ("cpu", {"packing": "off"}, None),
        ("cuda", {"gradient_checkpointing": "on"}, None),
    ],
)
def test_settings_choose_the_plain_step(device, changes, why):
    shape = next(model.shape for model in list_models() if model.name == "smollm2-135m")
    precision = "float32" if device == "cpu" else "bfloat16"
    settings = TrainSettings.model_validate(changes)
    found = why_plain_step(settings, shape, device=device, precision=precision, capability=9.0)
    assert found is None if why is None else why in found
