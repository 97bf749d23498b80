"""Base and adapter are asked with one engine, whatever each could be asked with by itself."""

import json
from pathlib import Path

import torch
from gate_samples import new_answer, new_case
from safetensors.torch import save_file

from graftwork.evaluate.ask.answers import KeptAnswers, answer_key
from graftwork.evaluate.project import forget_subjects
from graftwork.evaluate.subjects import Lineup, Subject, with_one_engine
from graftwork.records.report import Endpoint, EvalJob


def make_subject(root, name, **changes):
    values = {
        "subject": name,
        "folder": str(root / name),
        "base_folder": str(root),
        "adapter_folder": None,
        "cases_file": str(root / "cases.jsonl"),
        "max_new_tokens": 8,
        "batch_size": 2,
        "identity": name,
        "answers_folder": str(root / "answers"),
        "device": "cuda",
    }
    job = EvalJob(**{**values, **changes})
    return Subject(name, Path(job.folder), job, name)


def with_adapter(root, name, **config):
    folder = root / f"{name}-weights"
    folder.mkdir()
    save_file({"model.q_proj.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    return make_subject(root, name, adapter_folder=str(folder))


def engines_of(lineup):
    return {s.name: s.job.engine for s in with_one_engine(lineup).all if s.job is not None}


def test_all_models_are_asked_with_the_engine_that_the_environment_names(tmp_path, monkeypatch):
    base, adapter = make_subject(tmp_path, "base"), with_adapter(tmp_path, "adapter")
    named = make_subject(tmp_path, "named", engine="llamacpp 0.2")
    away = make_subject(tmp_path, "away", endpoint=Endpoint(url="http://h/v1", model="m"))
    log = Subject("log", tmp_path / "log")
    lineup = Lineup(base, adapter, others=(named,), references=(away, log))
    fixed = {"named": "llamacpp 0.2", "away": ""}
    assert engines_of(lineup) == {"base": "graftwork", "adapter": "graftwork", **fixed}
    monkeypatch.setenv("GRAFT_ENGINE", "echo")
    assert engines_of(lineup) == {"base": "echo", "adapter": "echo", **fixed}


def test_asked_again_the_answers_of_this_engine_are_forgotten_in_every_precision(tmp_path):
    case = new_case("c", "?", "!")
    answer = new_answer("c", "t")
    lineup = Lineup(make_subject(tmp_path, "base"), with_adapter(tmp_path, "adapter"))
    kept = KeptAnswers(tmp_path / "answers")
    settled = [s.job.model_copy(update={"precision": "bfloat16"}) for s in with_one_engine(lineup).all]
    other = settled[0].model_copy(update={"engine": "echo"})
    for job in (*settled, other):
        kept.put(answer_key(job, case), answer)
    forget_subjects(lineup, [case])
    assert [kept.get(answer_key(job, case), case_id="c") is None for job in (*settled, other)] == [
        True,
        True,
        False,
    ]
