"""The llama.cpp engine against our own weights: the same probabilities, the same greedy answers."""

import json
import shutil
from pathlib import Path

import pytest

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.interface import DecodingSettings, EngineSource
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message

pytest.importorskip("xllamacpp")

from graftwork.engines.llamacpp import LlamaCppEngine, LlamaOptions, LlamaServer
from graftwork.model.gguf import adapter_file, base_file, find_turn_texts, write_merged, write_modelfile

QUESTIONS = (
    "Which river is the longest?",
    "Zähle bis 3: 1, 22, 333 …",
    "def f(x):\n    return x  # <|im_end|>",
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_model(folder: Path, tokenizer: Path, family: str, *, seed: int = 3) -> Path:
    """A random two-layer model with weights large enough that its answers are no ties."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder / name)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if family == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    config = AutoConfig.for_model(
        "llama" if family == "llama3" else family,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if family == "qwen3" else 16,
        vocab_size=49152,
        tie_word_embeddings=family != "qwen2",
        max_position_embeddings=512,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, mean=1.0 if "norm" in name else 0.0, std=0.1)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, *, kind: str = "lora") -> Path:
    """Another rank for one kind of layer and another strength for a second: every scale must be right."""
    import torch

    from graftwork.model.adapters.peft import AdapterShape, attach, save_adapter
    from graftwork.model.load import load_base

    model = load_base(base)
    uneven = {} if kind == "dora" else {"ranks": {"v_proj": 2}, "alphas": {"up_proj": 12.0}}
    shape = AdapterShape(rank=4, alpha=6.0, targets=TARGETS, layers=(0, 1), kind=kind, **uneven)
    torch.manual_seed(5)
    for parameter in attach(model, shape, seed=1):
        parameter.data.add_(torch.randn_like(parameter.data), alpha=0.15)
    save_adapter(model, folder, shape=shape, base="tiny")
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory, embedded_base):
    """Converted test models do not go into the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def make(embedded_base, tmp_path_factory):
    def make(family: str):
        folder = tmp_path_factory.mktemp(family)
        base = make_model(folder / "base", Path(embedded_base.folder), family)
        return base, make_adapter(base, folder / "adapter")

    return make


@pytest.fixture(scope="module")
def model(make):
    return make("llama")


def source(model, precision: str = "f32") -> EngineSource:
    base, adapter = model
    return EngineSource(base_folder=base, adapters={"adapter": adapter}, precision=precision, threads=1)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_probabilities_and_greedy_answers_equal_those_of_the_embedded_engine(make, family):
    """At every position the ten likeliest tokens have the log-probabilities that torch computes."""
    import torch

    from graftwork.model.adapters.peft import acting, load_adapter
    from graftwork.model.load import load_base

    base, adapter = model = make(family)
    reference = load_base(base)
    load_adapter(reference, adapter, name="adapter")
    ours, theirs = EmbeddedEngine(source(model, "float32")), LlamaCppEngine(source(model))
    decoding = DecodingSettings(max_new_tokens=12)
    for name in (None, "adapter"):
        for question in QUESTIONS:
            prompt = theirs.render((Message(role="user", content=question),))
            body = theirs._server.encode(prompt.tokens, decoding, adapter=name, reuse=False, n_probs=10)
            events = [event for event in theirs._server.events(body) if event["tokens"]]
            tokens = [event["tokens"][0] for event in events]
            with torch.inference_mode(), acting(reference, name):
                logits = reference(torch.tensor([[*prompt.tokens, *tokens]])).logits[
                    0, len(prompt.tokens) - 1 : -1
                ]
            expected = logits.float().log_softmax(-1)
            for place, event in enumerate(events):
                for likely in event["completion_probabilities"][0]["top_logprobs"]:
                    assert likely["logprob"] == pytest.approx(float(expected[place, likely["id"]]), abs=3e-4)
            (reply,) = theirs.answer([prompt], decoding, adapter=name)
            assert [reply] == ours.answer([prompt], decoding, adapter=name)
    theirs.close()


def test_an_adapter_changes_the_answers_and_the_base_stays_the_base(model):
    engine = LlamaCppEngine(source(model, "q8_0"))
    prompt = engine.render((Message(role="user", content=QUESTIONS[0]),))
    decoding = DecodingSettings(max_new_tokens=12)
    (plain,) = engine.answer([prompt], decoding)
    (adapted,) = engine.answer([prompt], decoding, adapter="adapter")
    assert plain.text != adapted.text
    assert engine.answer([prompt], decoding) == [plain]
    engine.close()


def test_a_converted_file_is_made_once_for_each_content(model, tmp_path):
    base, adapter = model
    first = adapter_file(adapter, base=base)
    # Its time is that of the last use; a file that is made again is another one.
    made = first.stat().st_ino
    assert adapter_file(adapter, base=base).stat().st_ino == made
    changed = tmp_path / "changed"
    shutil.copytree(adapter, changed)
    config = json.loads((changed / "adapter_config.json").read_text())
    (changed / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 7.0}))
    assert adapter_file(changed, base=base) != first
    assert base_file(base, precision="f16") != base_file(base, precision="f32")
    assert not list(first.parent.glob(".*"))


def test_an_adapter_that_llama_cpp_cannot_apply_is_refused(model, tmp_path):
    base, adapter = model
    dora = tmp_path / "dora"
    shutil.copytree(adapter, dora)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UserError, match="DoRA"):
        adapter_file(dora, base=base)


def test_a_family_that_the_writer_does_not_know_is_refused(model, tmp_path):
    base, _ = model
    other = tmp_path / "other"
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "phi3"}))
    (other / "graftwork.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="phi3"):
        base_file(other, precision="f32")


def test_llama_cpp_splits_text_as_the_tokenizer_does(model):
    from tokenizers import Tokenizer

    base, _ = model
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    server = LlamaServer(base_file(base, precision="f32"), options=LlamaOptions(threads=1, context=256))
    for text in (*QUESTIONS[:2], "Don't  panic:\n\n\ttabs, 漢字, émoji 🎉 and 12345.67"):
        assert server.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids
    server.close()


def test_a_server_that_has_just_started_can_be_closed(model):
    base, _ = model
    file = base_file(base, precision="f32")
    for _ in range(3):
        LlamaServer(file, options=LlamaOptions(threads=1, context=256)).close()


@pytest.mark.slow
def test_smollm2_answers_as_the_embedded_engine_does(embedded_base):
    """The real base in float32, its own tokenizer and template: the greedy answers are the same texts."""
    where = EngineSource(base_folder=Path(embedded_base.folder), precision="f32", threads=1)
    ours, theirs = EmbeddedEngine(where._replace(precision="float32")), LlamaCppEngine(where)
    questions = (*QUESTIONS, "Say hello with three emoji.", "Name the planets.", "Write a haiku about snow.")
    prompts = [theirs.render((Message(role="user", content=question),)) for question in questions]
    decoding = DecodingSettings(max_new_tokens=40)
    assert theirs.answer(prompts, decoding) == ours.answer(prompts, decoding)
    theirs.close()


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_a_merged_file_answers_as_base_and_adapter_do(model, tmp_path, kind):
    base, adapter = model
    if kind == "dora":
        adapter = make_adapter(base, tmp_path / "dora", kind="dora")
    if kind == "full":
        adapter = make_model(tmp_path / "full", base, "llama", seed=4)
    merged = tmp_path / "merged.gguf"
    write_merged(base, adapter, merged, precision="f32")
    where = EngineSource(base_folder=base, adapters={"adapter": adapter}, threads=1)
    ours = EmbeddedEngine(where)
    prompt = ours.render((Message(role="user", content=QUESTIONS[0]),))
    decoding = DecodingSettings(max_new_tokens=12)
    server = LlamaServer(merged, options=LlamaOptions(threads=1, context=256, exact=True))
    body = server.encode(prompt.tokens, decoding, adapter=None, stream=False)
    (event,) = server.events(body)
    server.close()
    (reply,) = ours.answer([prompt], decoding, adapter="adapter")
    assert ours.template.decode(event["tokens"]) == reply.text
    assert ours.answer([prompt], decoding)[0].text != reply.text


def test_the_ollama_template_writes_what_the_chat_template_writes(model):
    from graftwork.model.chat.template import ChatTemplate

    base, _ = model
    template = ChatTemplate.from_folder(base)
    turns = find_turn_texts(template)
    asked = (Message(role="system", content="Be brief."), Message(role="user", content="Why?"))
    assert turns.write(asked) == template.prompt_text(asked)
    modelfile = write_modelfile(template, gguf="model.gguf")
    assert modelfile.startswith("FROM ./model.gguf\n")
    assert "ADAPTER" not in modelfile
    assert 'PARAMETER stop "<|im_end|>"' in modelfile
    assert modelfile.count('"""') == 2
    assert turns.to_go().count("{{") == turns.to_go().count("}}")


def test_a_template_that_changes_earlier_turns_gives_no_ollama_template(model, tmp_path):
    from graftwork.model.chat.template import ChatTemplate

    base, _ = model
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / name)
    numbered = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ loop.index }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(numbered)
    template = ChatTemplate.from_folder(tmp_path)
    assert find_turn_texts(template) is None
    assert "TEMPLATE" not in write_modelfile(template, gguf="model.gguf")
