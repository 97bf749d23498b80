"""The written-out decoder: the gradients of transformers, and documents that never see each other."""

import random
import weakref
from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import make_tuning
from sample_rows import make_row
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from graftwork.costmodel.gpu_memory import extra_bytes, weights_again
from graftwork.costmodel.gpu_tuning import best_levels
from graftwork.costmodel.run import bin_rows, round_places, round_tokens
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.load import base_digest
from graftwork.model.nf4 import dequantize as dequantise_nf4
from graftwork.model.nf4 import quantize
from graftwork.model.shape import shape_of
from graftwork.records.plan import ModelShape
from graftwork.train.engine import TrainingEngine
from graftwork.train.engine_choice import why_plain_step
from graftwork.train.gpu.engine import GpuEngine, pack
from graftwork.train.gpu.linear import (
    EightBitLinear,
    FourBitWeight,
    dequantize_four,
    product,
    quantize_eight,
    transposed_product,
)
from graftwork.train.gpu.load import load_quantized
from graftwork.train.settings import ALL_LINEARS, TrainSettings

SETTINGS = TrainSettings(rank=4, alpha=8, max_grad_norm=1e9)
SHAPE = ModelShape(
    name="tiny",
    hidden_size=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=192,
    vocab_size=512,
    tied_embeddings=False,
    max_positions=128,
)


def make_model(config=LlamaConfig, *, tied=False):
    torch.manual_seed(0)
    settings = config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
        tie_word_embeddings=tied,
    )
    if config is MistralConfig:
        settings.sliding_window = None
    if config is LlamaConfig:
        settings.attention_bias = True
    return AutoModelForCausalLM.from_config(settings).eval().requires_grad_(False)


def make_rows(lengths, *, seed=1):
    chance = random.Random(seed)
    return [
        make_row(str(at), (chance.randrange(512) for _ in range(length)), max(1, length // 2))
        for at, length in enumerate(lengths)
    ]


def learn_something(parameters):
    with torch.no_grad():
        for at, parameter in enumerate(parameters):
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(at))


def card_engine(model, tuning, *, layers=(0, 1, 2), targets=ALL_LINEARS):
    frozen = load_quantized(model, tuning, device="cpu")
    parameters = attach(model, AdapterShape(rank=4, alpha=8, targets=targets, layers=layers), seed=3)
    learn_something(parameters)
    engine = GpuEngine(model, parameters, settings=SETTINGS, frozen=frozen, tuning=tuning, shape=SHAPE)
    engine.settle(())
    return engine


def plain_engine(model, *, layers=(0, 1, 2), targets=ALL_LINEARS):
    parameters = attach(model, AdapterShape(rank=4, alpha=8, targets=targets, layers=layers), seed=3)
    learn_something(parameters)
    return TrainingEngine(model, parameters, settings=SETTINGS)


def gradients(engine, rows):
    measured = engine.backward(rows)
    return measured.loss, [parameter.grad.clone() for parameter in engine.parameters]


def distance(ours, theirs):
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(ours, theirs, strict=True))


FAMILIES = [LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config]


# One block of each kind in every family, and blocks of one kind alone in one.
@pytest.mark.parametrize(
    ("config", "keep", "lean"),
    [
        *((config, 1, 1) for config in FAMILIES),
        *((LlamaConfig, *levels) for levels in ((3, 0), (0, 3), (0, 0))),
    ],
)
def test_gradients_are_those_of_the_plain_path_whatever_is_kept(config, keep, lean):
    rows = make_rows((30, 11, 19, 7))
    loss, theirs = gradients(plain_engine(make_model(config)), rows)
    ours = gradients(card_engine(make_model(config), make_tuning(keep=keep, lean=lean)), rows)
    assert ours[0] == pytest.approx(loss, rel=1e-5)
    assert distance(ours[1], theirs) < 1e-4


def test_upper_blocks_alone_learn_the_same_and_nothing_below_is_kept():
    rows = make_rows((12, 20))
    some = {"layers": (1, 2), "targets": ("q_proj", "v_proj", "down_proj")}
    loss, theirs = gradients(plain_engine(make_model(), **some), rows)
    ours = gradients(card_engine(make_model(), make_tuning(keep=1, lean=1), **some), rows)
    assert ours[0] == pytest.approx(loss, rel=1e-5)
    assert distance(ours[1], theirs) < 1e-4


def test_documents_in_one_pack_never_see_each_other():
    rows = make_rows((9, 14, 5))
    engine = card_engine(make_model(), make_tuning())
    together = engine.mean_loss(rows)
    alone = [engine.mean_loss([row]) for row in rows]
    trained = [len(row.tokens) - row.trained_from for row in rows]
    expected = sum(a * b for a, b in zip(alone, trained, strict=True)) / sum(trained)
    assert together == pytest.approx(expected, rel=1e-5)
    # A neighbour that changes changes nothing for the others.
    first = gradients(engine, rows[:1])[0]
    neighbour = make_rows((14,), seed=99)[0]
    both = engine.mean_loss([rows[0], neighbour])
    other = engine.mean_loss([neighbour])
    n = [trained[0], len(neighbour.tokens) - neighbour.trained_from]
    assert both * sum(n) - other * n[1] == pytest.approx(first * n[0], rel=1e-4)


def test_a_step_in_several_passes_is_the_step_in_one():
    rows = make_rows((30, 28, 25, 31))
    one = gradients(card_engine(make_model(), make_tuning(micro_tokens=128)), rows)
    four = gradients(card_engine(make_model(), make_tuning(micro_tokens=32)), rows)
    assert one[0] == pytest.approx(four[0], rel=1e-5)
    assert distance(one[1], four[1]) < 1e-4


@pytest.mark.parametrize("form", ["eight", "four"])
def test_weights_in_fewer_bits_learn_nearly_the_same(form):
    rows = make_rows((30, 11, 19, 7))
    _, theirs = gradients(plain_engine(make_model()), rows)
    head = "eight" if form == "eight" else "whole"
    _, ours = gradients(card_engine(make_model(), make_tuning(form=form, head=head, keep=1, lean=1)), rows)
    flat = [torch.cat([g.flatten() for g in found]) for found in (ours, theirs)]
    near = float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))
    assert near > (0.98 if form == "eight" else 0.9)


@pytest.mark.parametrize("form", ["whole", "eight", "four"])
def test_the_model_itself_still_answers_with_the_same_weights_and_they_stay(form):
    rows = make_rows((20, 9))
    model = make_model(tied=True)
    engine = card_engine(model, make_tuning(form=form, host_embedding=True))
    before = base_digest(model)
    with torch.no_grad():
        logits = model(torch.tensor([rows[0].tokens]), use_cache=False).logits[0]
    taken = torch.tensor(rows[0].tokens[rows[0].trained_from :])
    own = torch.nn.functional.cross_entropy(logits[rows[0].trained_from - 1 : -1].float(), taken)
    assert engine.mean_loss(rows[:1]) == pytest.approx(float(own), rel=1e-5 if form != "eight" else 0.02)
    engine.backward(rows)
    engine.apply(1e-2)
    assert base_digest(model) == before


def test_eight_bits_give_both_products_from_the_same_codes():
    weight, x, y = (torch.randn(48, 64), torch.randn(20, 64), torch.randn(20, 48))
    for turned in (False, True):
        eight = quantize_eight([weight], None, turned=turned, device="cpu")
        numbers = eight.codes.float() * eight.scale
        assert (product(eight, x) - x @ numbers.t()).norm() / (x @ weight.t()).norm() < 0.04
        assert (transposed_product(eight, y) - y @ numbers).norm() / (y @ weight).norm() < 0.04


def test_four_bits_are_read_as_they_are_written():
    found = [quantize(torch.randn(rows, 128)) for rows in (40, 8)]
    levels = torch.tensor(__import__("graftwork.model.nf4", fromlist=["LEVELS"]).LEVELS)
    ours = dequantize_four(FourBitWeight(tuple(found), levels, None), torch.float32)
    assert torch.allclose(ours, torch.cat([dequantise_nf4(w, torch.float32) for w in found]), atol=1e-6)


def test_a_family_without_a_written_out_step_is_reported():
    known = make_model().config.to_dict()

    def why(settings=SETTINGS, capability=9.0, **changes):
        shape = shape_of({**known, **changes}, name="tiny")
        return why_plain_step(
            settings, shape, device="cuda", precision=settings.precision, capability=capability
        )

    assert why() is None
    assert "family" in why(model_type="gpt_neox")
    assert "activation" in why(hidden_act="relu")
    assert "part of each head" in why(model_type="phi3", rope_parameters=None, partial_rotary_factor=0.75)
    assert "mean and variance" in why(model_type="cohere", use_qk_norm=True)
    assert "length of a batch" in why(rope_parameters={"rope_type": "longrope"})
    assert "multiples of 64" in why(intermediate_size=100)
    assert "bfloat16" in why(SETTINGS.model_copy(update={"precision": "float16"}))
    assert "Ampere" in why(capability=7.5)
    assert "dora" in why(SETTINGS.model_copy(update={"method": "dora"}))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(16, 64))
def test_every_row_goes_once_and_no_pass_is_too_full(lengths, room):
    bins = bin_rows(lengths, room=room)
    assert sorted(row for some in bins for row in some) == list(range(len(lengths)))
    for some in bins:
        assert len(some) == 1 or sum(lengths[row] for row in some) <= room


@given(st.integers(1, 9000), st.integers(64, 9000))
def test_passes_have_few_sizes(count, room):
    size = round_tokens(count, room=room)
    assert size >= count
    assert size - count < max(-(-room // 4), 256)
    if count <= room:
        # A full pass is hardly larger than it must be.
        assert size <= max(room + 3, 256 * -(-room // 256))


@given(st.integers(1, 9000), st.sampled_from([16, 256, 1024, 2048]))
def test_the_head_looks_at_few_places_that_predict_nothing(count, head_tokens):
    places = round_places(count, head_tokens=head_tokens)
    assert places >= count
    assert places <= max(2 * count, 64) or places % head_tokens == 0
    if count < head_tokens:
        assert places <= max(2 * count, min(64, head_tokens))
    else:
        assert places - count < head_tokens


@given(st.lists(st.integers(2, 60), min_size=1, max_size=9))
def test_a_pack_predicts_exactly_the_trained_tokens(lengths):
    rows = make_rows(lengths)
    portions = pack(rows, make_tuning(head_tokens=8, longest=0), device="cpu")
    found = sorted(int(t) for p in portions for t in p.targets if t >= 0)
    assert found == sorted(token for row in rows for token in row.tokens[row.trained_from :])
    for portion in portions:
        for place, target in zip(portion.predicts, portion.targets, strict=True):
            assert target < 0 or portion.tokens[place + 1] == target


@given(st.floats(0, 5e6), st.integers(1, 3), st.integers(16, 512))
def test_levels_stay_within_their_room_and_no_block_more_would_fit(room, adapted, tokens):
    keep, lean = best_levels(SHAPE, room, tokens=tokens, adapted=adapted)
    cost = {level: extra_bytes(SHAPE, level) * tokens for level in ("keep", "lean")}
    assert keep * cost["keep"] + lean * cost["lean"] <= room + 1e-6
    assert keep + lean <= adapted
    if keep + lean < adapted:
        assert keep * cost["keep"] + (lean + 1) * cost["lean"] > room
    others = [
        (k, n)
        for k in range(adapted + 1)
        for n in range(adapted + 1 - k)
        if k * cost["keep"] + n * cost["lean"] <= room
    ]
    assert weights_again(SHAPE, (keep, lean), adapted) == min(
        weights_again(SHAPE, other, adapted) for other in others
    )


class Crowded:
    """A decoder that finds no memory while others hold recordings."""

    def __init__(self, holders):
        self._holders = holders
        self.passes = 0

    def learn(self, x, packed, scale, progress=lambda: None):
        if self._holders:
            raise torch.OutOfMemoryError("no room")
        self.passes += 1
        return torch.tensor(1.0)


@pytest.fixture
def pools(monkeypatch):
    """Pools and streams of a GPU that do nothing."""
    monkeypatch.setattr(torch.cuda, "MemPool", MagicMock)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.mark.usefixtures("pools")
def test_recordings_give_way_to_a_batch_of_another_shape():
    from graftwork.train.gpu.decoder import CudaGraphDecoder

    weight = torch.nn.Parameter(torch.ones(2))
    captured = CudaGraphDecoder(Crowded({}), [weight])
    assert torch.equal(weight.grad, torch.zeros(2))
    crowded = Crowded(captured._recordings)
    captured.decoder = crowded
    captured._recordings["a full pass"] = "its memory"
    (portion,) = pack(make_rows((20, 30)), make_tuning(head_tokens=8, longest=0), device="cpu")
    assert float(captured.learn(portion.tokens[:, None], portion, torch.tensor(1.0))) == 1.0
    assert crowded.passes == 1
    assert not captured._recordings


class Activations:
    """What a pass has in memory until its frame is gone."""


class FullWhileRecording:
    """A decoder whose second pass, the recording, finds no memory."""

    def __init__(self):
        self.passes = 0

    def learn(self, x, packed, scale, progress=lambda: None):
        self.passes += 1
        if self.passes == 2:
            activations = Activations()
            self.left = weakref.ref(activations)
            raise torch.OutOfMemoryError("no room")
        assert self.passes == 1 or self.left() is None
        return torch.tensor(1.0)


@pytest.mark.usefixtures("pools")
def test_a_recording_without_memory_is_freed_before_its_pass_is_computed(monkeypatch):
    from graftwork.train.gpu import decoder

    monkeypatch.setattr(decoder, "record", lambda compute, **_where: compute())
    full = FullWhileRecording()
    captured = decoder.CudaGraphDecoder(full, [torch.nn.Parameter(torch.ones(2))])
    (portion,) = pack(make_rows((20, 30)), make_tuning(head_tokens=8, longest=0), device="cpu")
    for passes in (1, 3, 4):
        assert float(captured.learn(portion.tokens[:, None], portion, torch.tensor(1.0))) == 1.0
        assert full.passes == passes


def test_memory_that_ran_out_is_known_behind_another_error():
    from graftwork.train.gpu.decoder import is_out_of_memory

    broken = RuntimeError("the recording was broken off")
    broken.__context__ = torch.OutOfMemoryError("no room")
    assert is_out_of_memory(broken)
    assert is_out_of_memory(torch.OutOfMemoryError("no room"))
    assert not is_out_of_memory(RuntimeError("something else"))


def test_the_optimizer_goes_on_with_its_count_where_the_weights_are():
    from graftwork.train.distributed.strategies import SingleProcess

    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    strategy = SingleProcess()
    strategy.prepare(None, [weight], torch.optim.AdamW([weight]), lambda batch: batch)
    strategy.load_optimizer_state(
        weight, {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    )
    assert {tensor.device.type for tensor in strategy.optimizer_state(weight).values()} == {"meta"}


def test_layers_that_are_adapted_behind_attention_alone_are_counted():
    engine = card_engine(make_model(), make_tuning(), layers=(1, 2), targets=("o_proj",))
    assert len(engine._decoder.blocks) - engine._decoder.first == 2


def write_answers(model, token_pass, prompts):
    from graftwork.model.adapters.lora import active_adapter
    from graftwork.model.generate.generator import Sampling, open_decoder
    from graftwork.model.generate.sampling import GenerationRequest, TokenOptions

    decoder = open_decoder(model, stop_tokens=[-1], slots=8, recorded=True, token_pass=token_pass)
    decoder.update_adapters()
    requests = [
        GenerationRequest(
            prompt,
            Sampling(20, temperature=1.0, seed=at),
            adapter=active_adapter(model),
            options=TokenOptions(logprobs=0),
        )
        for at, prompt in enumerate(prompts)
    ]
    for request in requests:
        decoder.submit(request)
    decoder.finish()
    return [request.result.tokens for request in requests], [
        [token.logprob for token in request.options.noted] for request in requests
    ]


@pytest.mark.parametrize("config", FAMILIES)
def test_tokens_are_written_by_the_training_step_as_by_the_model_itself(config):
    model = make_model(config)
    engine = card_engine(model, make_tuning())
    token_pass = engine.token_pass()
    prompts = [list(row.tokens) for row in make_rows((30, 11, 19, 7))]
    for _ in range(2):
        tokens, logprobs = write_answers(model, token_pass, prompts)
        expected, theirs = write_answers(model, None, prompts)
        assert tokens == expected
        for ours, other in zip(logprobs, theirs, strict=True):
            assert ours == pytest.approx(other, abs=1e-4)
        rows = make_rows((20, 9))
        engine.backward(rows)
        engine.apply(0.05)


def test_log_probabilities_of_written_tokens_are_those_that_training_computes_in_eight_bits():
    model = make_model()
    engine = card_engine(model, make_tuning(form="eight", head="eight"))
    (prompt,) = ([*row.tokens] for row in make_rows((16,)))
    (tokens,), (logprobs,) = write_answers(model, engine.token_pass(), [prompt])
    (row,) = make_rows((16,))
    whole = row.model_copy(update={"tokens": (*prompt, *tokens), "trained_from": len(prompt)})
    (expected,) = engine.log_probabilities([whole])
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_model_that_only_reads_multiplies_in_eight_bits_as_training_does():
    weight, x = torch.randn(48, 64), torch.randn(2, 5, 64)
    shared = quantize_eight([weight], torch.randn(48), turned=False, device="cpu")
    layer = EightBitLinear(shared, start=16, rows=32, dtype=torch.float32)
    expected = product(shared, x.flatten(0, 1)).view(2, 5, 48)[..., 16:]
    torch.testing.assert_close(layer(x), expected)
    learned = layer(x.clone().requires_grad_(True))
    assert learned.requires_grad
    assert float((learned.detach() - expected).norm() / expected.norm()) > 0.005


def test_eight_bit_weights_with_the_embedding_on_the_host_keep_the_type_of_the_model():
    """No parameter of such a model is left in its own type but norms: adapters come first."""
    model = make_model(MistralConfig).to(torch.bfloat16)
    engine = card_engine(model, make_tuning(form="eight", host_embedding=True))
    assert engine.backward(make_rows([20, 12])).loss > 0


def test_a_step_becomes_smaller_by_what_costs_least_until_nothing_is_left_to_give_up():
    from graftwork.train.gpu.engine import _one_less

    tuning = make_tuning(keep=1, lean=1, head_tokens=512, chunk_tokens=2048, micro_tokens=96, longest=40)
    taken = []
    while (tuning := _one_less(tuning)) is not None:
        taken.append((tuning.keep, tuning.lean, tuning.head_tokens, tuning.chunk_tokens, tuning.micro_tokens))
    assert taken == [
        (0, 2, 512, 2048, 96),
        (0, 1, 512, 2048, 96),
        (0, 0, 512, 2048, 96),
        (0, 0, 256, 2048, 96),
        (0, 0, 256, 1024, 96),
        (0, 0, 256, 1024, 48),
        (0, 0, 128, 1024, 48),
        (0, 0, 128, 512, 48),
    ]


def test_a_prefetched_batch_is_used_for_its_own_rows_alone(monkeypatch):
    engine = card_engine(make_model(), make_tuning())
    monkeypatch.setattr(engine, "_on_gpu", True)
    rows, others = make_rows([20, 12]), make_rows([9, 30], seed=2)
    expected = [engine.backward(some).loss for some in (rows, others)]
    engine.prefetch(rows)
    packed = engine._prefetched[1]
    assert engine.backward(others).loss == expected[1]
    engine.prefetch(rows)
    monkeypatch.setattr(engine, "_pack", lambda *_: pytest.fail("it is packed already"))
    assert engine.backward(rows).loss == expected[0]
    assert packed
