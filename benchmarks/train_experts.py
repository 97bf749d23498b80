"""A mixture-of-experts model on a card: `graft train` with its attention adapted, and with its experts too.

Run on a machine with a GPU: `python benchmarks/train_experts.py [--layers 6] [--save]`. The base has the
widths of Qwen3-30B-A3B (128 experts, 8 for each token), random weights, fewer layers and the tokenizer
of SmolLM2. Shows what was planned and what was used, and whether PEFT loads the adapter.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import save_results
from train_short_rows import CHANGES, EXAMPLE, _read_steps, make_random_base

WIDTHS = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip


def measure(base: Path, project: Path, *, experts: bool) -> dict[str, Any]:
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns(".graft", "*.html"))
    settings = (project / "graft.yaml").read_text()
    for pattern, text in (CHANGES | {r"max_rows:.*": "max_rows: 160", r"base:.*": f"base: {base}"}).items():
        settings = re.sub(pattern, text, settings)
    if experts:
        settings = re.sub(r"(train:\n)", r"\1  experts: true\n", settings)
    (project / "graft.yaml").write_text(settings)
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "--project", str(project)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (run,) = project.glob(".graft/runs/*")
    plan = json.loads((run / "job.json").read_text())["plan"]
    outcome = json.loads((run / "outcome.json").read_text())
    steps = _read_steps(run)
    planned, used = plan["peak_memory_gib"]["value"], outcome["peak_memory_gib"]
    return {
        "steps": len(steps),
        "median_step_ms": round(1000 * statistics.median(step.seconds for step in steps[1:]), 1),
        "planned_gib": round(planned, 2),
        "used_gib": round(used, 2),
        "error_of_the_plan": round(planned / used - 1, 4),
        "loss": [round(steps[0].loss, 4), round(steps[-1].loss, 4)],
        "trainable": outcome["trainable_parameters"],
        "peft": check_with_peft(base, Path(outcome["adapter_folder"])),
    }


def check_with_peft(base: Path, adapter: Path) -> dict[str, Any]:
    """Whether PEFT loads the adapter whole, and how far it moves the logits."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).cuda()
    tokens = torch.arange(3, 67, device="cuda")[None]
    with torch.no_grad():
        before = model(tokens).logits.float()
        adapted = PeftModel.from_pretrained(model, str(adapter))
        change = (adapted(tokens).logits.float() - before).abs().mean()
    found = sum(parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name)
    return {"adapter_parameters": found, "mean_change_of_logits": round(float(change), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train_experts.json")
    asked = parser.parse_args()
    import torch
    from transformers import Qwen3MoeConfig

    if not torch.cuda.is_available():
        print("passed over: this needs a GPU")
        return
    figures: dict[str, Any] = {"layers": asked.layers}
    with tempfile.TemporaryDirectory(prefix="graft-") as name:
        scratch = Path(name)
        shape = {**WIDTHS, "num_hidden_layers": asked.layers}
        base = make_random_base(Qwen3MoeConfig, shape, scratch / "base")
        for experts in (False, True):
            case = "attention and experts" if experts else "attention"
            try:
                figures[case] = measure(base, scratch / case.rsplit(maxsplit=1)[-1], experts=experts)
            except subprocess.CalledProcessError as failed:
                figures[case] = {"failed": str(failed)}
            print(case, json.dumps(figures[case]), flush=True)
    if asked.save:
        save_results("train_experts", figures, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
