"""vLLM as a subject: when it is used, what it is asked, what it must not report to anyone. With a stand-in of
its offline engine; tests/contract/test_vllm_live.py asks the real one."""

import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from graftwork.evaluate.ask import worker
from graftwork.evaluate.ask.answers import CaseBatch, read_answers
from graftwork.evaluate.ask.worker import GENERATION_FILE, evaluate, share_out
from graftwork.evaluate.cases import write_cases
from graftwork.inference import selection
from graftwork.inference.engine import DecodingSettings, RenderedPrompt
from graftwork.inference.selection import (
    ADAPTER,
    agree_on_engine,
    can_use_vllm,
    open_engine,
    settle,
    source_of,
)
from graftwork.inference.vllm_engine import KEEPS_TO_ITSELF, NOT_COMPILED, VllmEngine, lora_rank
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case, Endpoint, EvalJob, Generation


def make_cases(n):
    return tuple(
        Case(
            id=f"c{i:03}",
            origin=Origin(file="f", line=i + 1),
            messages=(Message(role="user", content="why " * (1 + i)),),
            reference=f"because {i}",
        )
        for i in range(n)
    )


def make_job(root, base, **changes):
    write_cases(root / "cases.jsonl", cases=make_cases(3))
    values = {
        "subject": "base",
        "folder": str(root / "job"),
        "base_folder": str(base),
        "adapter_folder": None,
        "cases_file": str(root / "cases.jsonl"),
        "max_new_tokens": 6,
        "batch_size": 3,
        "latency_cases": 2,
        "threads": 1,
        "identity": "tiny",
        "device": "cuda",
        "precision": "bfloat16",
    }
    return EvalJob(**{**values, **changes})


class StandInEngine:
    """What of vLLM's offline engine is used, with the shapes that 0.32 was seen to give."""

    made: list["StandInEngine"] = []

    def __init__(self, model, **options):
        self.model, self.options, self.asked, self.resets = model, options, [], 0
        self.surroundings = dict(os.environ)
        StandInEngine.made.append(self)

    def generate(self, prompts, params, *, lora_request=None, use_tqdm=True):
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        self.asked.append((params, lora_request, use_tqdm))
        return [self._output(p["prompt_token_ids"], own) for p, own in zip(prompts, params, strict=True)]

    def reset_prefix_cache(self):
        self.resets += 1

    def _output(self, tokens, params):
        stop = params.given.get("stop_token_ids", [0])[0]
        output = types.SimpleNamespace(token_ids=(*b"ok", stop), finish_reason="stop")
        reported = [None] + [{t: types.SimpleNamespace(logprob=-0.5)} for t in tokens[1:]]
        return types.SimpleNamespace(
            outputs=[output],
            prompt_logprobs=reported if "prompt_logprobs" in params.given else None,
            metrics=types.SimpleNamespace(first_token_latency=1e-9),
        )


class Given:
    def __init__(self, *args, **given):
        self.args, self.given = args, given


@pytest.fixture
def vllm(monkeypatch):
    StandInEngine.made.clear()
    package = types.ModuleType("vllm")
    package.LLM, package.SamplingParams, package.__version__ = StandInEngine, Given, "0.32.0"
    package.__spec__ = types.SimpleNamespace(name="vllm")
    request = types.ModuleType("vllm.lora.request")
    request.LoRARequest = Given
    for name, module in {
        "vllm": package,
        "vllm.lora": types.ModuleType("vllm.lora"),
        "vllm.lora.request": request,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(selection, "vllm_version", lambda: package.__version__)
    for name in (*KEEPS_TO_ITSELF, *NOT_COMPILED, "VLLM_LOGGING_LEVEL"):
        # Set by the engine; set here first, each is as before when the test is over.
        monkeypatch.setenv(name, "as it was")
    monkeypatch.delenv("GRAFT_VLLM", raising=False)
    return package


@pytest.fixture
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write_adapter(folder, *, layers=("q_proj",), **config):
    folder.mkdir(parents=True)
    names = [f"base_model.model.model.layers.0.{layer}.lora_A.weight" for layer in layers]
    save_file({name: torch.zeros(1) for name in names}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 12, **config}))
    return folder


@pytest.mark.usefixtures("vllm")
def test_vllm_is_used_only_with_a_card_and_an_adapter_that_it_serves(tmp_path, tiny_base, monkeypatch):
    job = make_job(tmp_path, tiny_base)
    assert can_use_vllm(job)
    assert not can_use_vllm(job.model_copy(update={"device": "cpu"}))
    plain, dora = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", use_dora=True)
    assert can_use_vllm(job.model_copy(update={"adapter_folder": str(plain)}))
    assert not can_use_vllm(job.model_copy(update={"adapter_folder": str(dora)}))
    assert not can_use_vllm(job.model_copy(update={"adapter_folder": str(tmp_path)}))
    last = job.model_copy(
        update={"adapter_folder": str(write_adapter(tmp_path / "c", layers=("q_proj", "lm_head")))}
    )
    assert can_use_vllm(last)
    assert not can_use_vllm(last.model_copy(update={"perplexity": True}))
    (plain / "adapter_model.safetensors").write_bytes(b"torn")
    assert not can_use_vllm(job.model_copy(update={"adapter_folder": str(plain)}))
    monkeypatch.setenv("GRAFT_VLLM", "0")
    assert not can_use_vllm(job)
    monkeypatch.setenv("GRAFT_VLLM", "1")
    assert can_use_vllm(job.model_copy(update={"device": "cpu"}))


@pytest.mark.usefixtures("vllm")
def test_where_vllm_cannot_serve_one_of_them_all_are_asked_with_our_own(tmp_path, tiny_base):
    base = make_job(tmp_path, tiny_base)
    plain = base.model_copy(update={"adapter_folder": str(write_adapter(tmp_path / "a"))})
    dora = base.model_copy(update={"adapter_folder": str(write_adapter(tmp_path / "b", use_dora=True))})
    away = base.model_copy(update={"endpoint": Endpoint(url="http://h/v1", model="m"), "device": "remote"})
    assert agree_on_engine([base, plain, away]) == "vllm 0.32.0"
    assert agree_on_engine([base, plain, dora]) == "graftwork"
    assert agree_on_engine([away]) == "graftwork"
    assert settle(away) == away


def test_a_vllm_that_was_never_tried_is_refused_before_anything_is_asked(
    vllm, tmp_path, tiny_base, monkeypatch
):
    vllm.__version__ = "0.320.1"
    job = make_job(tmp_path, tiny_base)
    with pytest.raises(EnvironmentLacks, match=r"0\.320\.1") as reported:
        evaluate(job)
    assert "GRAFT_VLLM=0" in reported.value.fix
    monkeypatch.setenv("GRAFT_VLLM", "1")
    assert agree_on_engine([job]) == "vllm 0.320.1"
    monkeypatch.setenv("GRAFT_VLLM", "0")
    assert agree_on_engine([job]) == "graftwork"


def test_a_vllm_that_does_not_start_is_reported_with_its_own_words_and_a_way_round(vllm, tmp_path, tiny_base):
    def refuse(**_options):
        raise TypeError("unexpected keyword argument 'generation_config'\nand more")

    vllm.LLM = refuse
    with pytest.raises(EnvironmentLacks, match=r"vllm 0\.32\.0 could not be started") as reported:
        open_engine("vllm 0.32.0", source_of(settle(make_job(tmp_path, tiny_base))))
    assert "generation_config" in reported.value.why
    assert "GRAFT_VLLM=0" in reported.value.fix


def test_vllm_lays_out_the_next_rank_that_it_knows(tmp_path):
    assert lora_rank(write_adapter(tmp_path / "a", r=12)) == 16
    assert lora_rank(write_adapter(tmp_path / "b", r=4, rank_pattern={"q_proj": 33})) == 64
    assert lora_rank(write_adapter(tmp_path / "c", r=1000)) is None
    assert lora_rank(write_adapter(tmp_path / "d", lora_bias=True)) is None


@pytest.mark.usefixtures("vllm")
def test_vllm_is_asked_in_tokens_with_the_adapter_on_every_request(tmp_path, tiny_base):
    adapter = write_adapter(tmp_path / "adapter")
    model = VllmEngine(source_of(make_job(tmp_path, tiny_base, adapter_folder=str(adapter))))
    (engine,) = StandInEngine.made
    assert engine.model == str(tiny_base)
    expected = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "lora_target_modules": ["q_proj"],
    }
    assert expected.items() <= engine.options.items()
    (reply,) = model.answer([RenderedPrompt((), [1, 2, 3])], DecodingSettings(6), adapter=ADAPTER)
    assert (reply.tokens, reply.finish_reason, reply.prompt_tokens) == (2, "stop", 3)
    (params,), lora, tqdm = engine.asked[0]
    assert (params.given["temperature"], params.given["max_tokens"], tqdm) == (0.0, 6, False)
    assert lora.args == ("adapter-tiny", 1, str(adapter))
    model.answer([RenderedPrompt((), [1])] * 2, DecodingSettings(6, 0.5, 0.9, 9))
    assert [params.given["seed"] for params in engine.asked[1][0]] == [9, 10]
    assert model.reply_losses([(make_cases(1)[0].messages, "yes")]) == [pytest.approx(0.5)]


@pytest.mark.usefixtures("vllm")
def test_a_request_is_timed_without_what_the_engine_remembers_of_it(tmp_path, tiny_base):
    model = VllmEngine(source_of(make_job(tmp_path, tiny_base)))
    timing = model.time_one(RenderedPrompt((), [1]), DecodingSettings(6))
    (engine,) = StandInEngine.made
    assert (engine.resets, timing.first_token) == (1, 1e-9)


@pytest.mark.usefixtures("vllm")
def test_vllm_asked_for_the_base_lays_out_no_adapter(tmp_path, tiny_base):
    model = VllmEngine(source_of(make_job(tmp_path, tiny_base)))
    model.answer([RenderedPrompt((), [1])], DecodingSettings(6))
    (engine,) = StandInEngine.made
    assert "enable_lora" not in engine.options
    assert engine.asked[0][1] is None


@pytest.mark.usefixtures("vllm", "same_threads")
def test_vllm_telemetry_is_disabled_before_it_is_loaded(tmp_path, tiny_base, monkeypatch):
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "0")
    VllmEngine(source_of(make_job(tmp_path, tiny_base, device="cpu", precision="float32")))
    (engine,) = StandInEngine.made
    seen = {name: engine.surroundings[name] for name in (*KEEPS_TO_ITSELF, *NOT_COMPILED)}
    assert seen == {**KEEPS_TO_ITSELF, **NOT_COMPILED}
    assert {"VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"} <= set(seen)
    # Left to itself it reserves 92 % of the machine and compiles for minutes.
    assert engine.options["enforce_eager"]
    assert engine.options["kv_cache_memory_bytes"] <= 2 * 2**30


@pytest.mark.usefixtures("vllm", "same_threads")
def test_answers_of_two_engines_are_never_mixed(tmp_path, tiny_base, monkeypatch):
    job = make_job(tmp_path, tiny_base, device="cpu", precision="", answers_folder=str(tmp_path / "answers"))

    def asked():
        evaluate(job)
        made = Generation.from_json((Path(job.folder) / GENERATION_FILE).read_bytes())
        return made.settings["engine"], [answer.text for answer in read_answers(Path(job.folder))]

    ours = asked()
    monkeypatch.setenv("GRAFT_VLLM", "1")
    theirs = asked()
    assert ours[0] == "graftwork"
    assert theirs[0] == "vllm 0.32.0"
    assert len(theirs[1]) == len(ours[1]) == 3
    assert set(theirs[1]).isdisjoint(ours[1])
    assert len(list((tmp_path / "answers").glob("??/*.json"))) == 6
    # Back again, what was kept is taken up: nothing of the other engine is among it.
    monkeypatch.setenv("GRAFT_VLLM", "0")
    assert asked() == ours


@pytest.mark.usefixtures("vllm")
def test_each_card_gets_one_vllm_and_each_vllm_sees_one_card(tmp_path, tiny_base, monkeypatch):
    job = make_job(tmp_path, tiny_base, shards=5, engine="vllm 0.32.0")
    batches = [CaseBatch(0, (f"c{i}",)) for i in range(8)]
    shares = share_out(job, batches, cards=2)
    assert [share.device for share in shares] == ["cuda:0", "cuda:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [worker._card_for(share)["CUDA_VISIBLE_DEVICES"] for share in shares] == ["4", "7"]
    ours = job.model_copy(update={"engine": "graftwork"})
    assert len(share_out(ours, batches, cards=2)) == 5
    assert worker._card_for(share_out(ours, batches, cards=2)[1]) == {}
