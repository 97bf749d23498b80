"""Two adapters that PEFT wrote are imported and asked the same cases until it is decided or none is left."""

import json

import yaml
from flows import opened

from graftwork.evaluate.live.comparison import compare_replayed
from graftwork.registry.deploy import import_release


def write_peft(base, folder, *, seed):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def test_imported_adapters_answer_the_same_cases_and_noise_does_not_decide(tiny_base, tmp_path):
    settings = {
        "project": "ab",
        "base": str(tiny_base),
        "data": {"logs": ["logs.jsonl"]},
        "evaluate": {"max_new_tokens": 4, "metrics": ["json_valid"], "latency_cases": 1},
        "train": {"threads": 1},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    lines = [{"prompt": f"question {n}", "reference": "{}"} for n in range(20)]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with opened(tmp_path) as work:
        a, b = (
            import_release(work, write_peft(tiny_base, tmp_path / f"peft-{seed}", seed=seed)).release.id
            for seed in (1, 2)
        )
        assert a != b
        found = compare_replayed(work, a, b, cases_file=tmp_path / "cases.jsonl")
    assert found.winner is None
    assert found.exit_code == 12
    assert (found.asked, found.used, found.counts["ties"]) == (20, 20, 20)
    assert found.low < 0 < found.high
