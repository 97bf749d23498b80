"""Seconds of training steps on a GPU: graft's recorded step, and transformers + PEFT as it comes.

Run on a machine with a GPU: `python benchmarks/step_time.py --out times.jsonl`, about four minutes; with
`--families`, eight layers of a decoder of every family instead. Random
weights, random tokens, LoRA of rank 16 on all linear layers, an optimizer step with clipping after each pass;
the figure is the median of 8 steps after 3. A line holds all that a plan needs to predict it: the decoder's
config, the rows, the tuning; and the kernels of one step, counted and timed by the profiler.
"""

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
RANK = 16
WARM_UP, TIMED = 3, 8
RUN_SECONDS = 100
KERNELS = {
    "attention": r"flash|fmha|sdpa|attention|cutlass.*attn",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitk|sm90_|sm80_",
    "copies": r"copy|memcpy|memset|cat",
    "reductions": r"reduce|softmax|norm",
}
"""Groups of kernels by their names; all others are elementwise."""

LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 8192}


def _decoder(
    kind: str, sizes: tuple[int, int, int, int, int, int], vocabulary: int, **more: Any
) -> dict[str, Any]:
    hidden, inner, layers, heads, kv_heads, head_dim = sizes
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        **more,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "135m": _decoder("llama", (576, 1536, 30, 9, 3, 64), 49_152, tie_word_embeddings=True),
    "360m": _decoder("llama", (960, 2560, 32, 15, 5, 64), 49_152, tie_word_embeddings=True),
    "1.4b": _decoder("llama", (2048, 5504, 24, 16, 16, 128), 49_152),
    "1.7b-qwen3": _decoder("qwen3", (2048, 6144, 28, 16, 8, 128), 151_936, tie_word_embeddings=True),
    "2b-gemma2": _decoder("gemma2", (2304, 9216, 26, 8, 4, 256), 256_000, tie_word_embeddings=True),
    "3b-llama": _decoder("llama", (3072, 8192, 28, 24, 8, 128), 128_256, tie_word_embeddings=True),
    "3b-starcoder2": _decoder("starcoder2", (3072, 12288, 30, 24, 2, 128), 49_152, tie_word_embeddings=True),
    "6.9b-qwen2": _decoder("qwen2", (3584, 18944, 28, 28, 4, 128), 49_152),
    "7b-qwen2": _decoder("qwen2", (3584, 18944, 28, 28, 4, 128), 152_064),
    "8b-llama": _decoder("llama", (4096, 14336, 32, 32, 8, 128), 128_256),
    "8b-qwen3": _decoder("qwen3", (4096, 12288, 36, 32, 8, 128), 151_936),
    "1b-gemma3": _decoder("gemma3_text", (1152, 6912, 26, 4, 1, 256), 262_144, tie_word_embeddings=True),
    "2b-granite": _decoder("granite", (2048, 8192, 40, 32, 8, 64), 49_155, tie_word_embeddings=True),
    "3.8b-phi3": _decoder("phi3", (3072, 8192, 32, 32, 32, 96), 32_064),
    "1b-olmo2": _decoder("olmo2", (2048, 8192, 16, 16, 16, 128), 100_352),
    "3b-smollm3": _decoder("smollm3", (2048, 11008, 36, 16, 4, 128), 128_256, tie_word_embeddings=True),
    "7b-cohere": _decoder("cohere", (4096, 14336, 32, 32, 8, 128), 256_000, tie_word_embeddings=True),
    "7b-mistral": _decoder("mistral", (4096, 14336, 32, 32, 8, 128), 32_768, sliding_window=None),
}
"""SmolLM2-135M and 360M, the two bases of `train_short_rows.py`, Qwen3-1.7B, Gemma 2 2B, Llama-3.2-3B,
StarCoder2-3B, Qwen2.5-7B, Llama-3.1-8B, Qwen3-8B; one decoder of every further family."""

DEMO = (96, 110, 121, 130, 138, 147, 160, 176)
"""Eight rows as the demo's log has them: 1,078 tokens."""


class Setting(NamedTuple):
    """One step. The planner tunes graft's own; transformers + PEFT runs under autocast with sdpa."""

    model: str
    engine: str
    lengths: tuple[int, ...]
    trained_share: float = 1.0
    method: str = "lora"
    limit_gib: float = 130.0
    room: int = 0
    """Tokens of the largest step of the run, which packs are filled up by; 0: of this one."""
    layers: int = 0
    """Fewer layers, as a probe takes; 0: all."""
    fp8: bool = True
    """8-bit products where the model is large enough."""

    @property
    def name(self) -> str:
        rows, longest = len(self.lengths), max(self.lengths)
        shown = (
            f"{rows} × {longest}"
            if min(self.lengths) == longest
            else f"{sum(self.lengths)} tokens in {rows} rows"
        )
        more = f", {self.layers} layers" if self.layers else ""
        more += f", {self.method}" if self.method != "lora" else ""
        more += f", {self.limit_gib:g} GiB" if self.limit_gib < 130 else ""
        more += ", 16 bits" if not self.fp8 else ""
        return f"{self.model} {self.engine}, {shown}{more}"


def _own(model: str, lengths: tuple[int, ...], **more: Any) -> Setting:
    return Setting(model, "graft", lengths, **more)


def _short(model: str, engine: str = "graft", **more: Any) -> Setting:
    lengths = DEMO if engine == "graft" else (140,) * 8
    room = 1320 if engine == "graft" else 0
    return Setting(model, engine, lengths, trained_share=0.25, room=room, **more)


SETTINGS = (
    _short("135m", "hf"),
    _short("135m"),
    Setting("135m", "hf", (2048,) * 2),
    _own("135m", (2048,) * 4),
    _short("360m", "hf"),
    _short("360m"),
    Setting("360m", "hf", (512,) * 8),
    _own("360m", (512,) * 8),
    _short("1.4b", "hf"),
    _short("1.4b"),
    Setting("1.4b", "hf", (2048,) * 2),
    _own("1.4b", (2048,) * 4),
    _own("1.4b", (2048,) * 2, fp8=False),
    _short("6.9b-qwen2", "hf"),
    _short("6.9b-qwen2"),
    Setting("3b-llama", "hf", (2048,) * 2),
    _own("3b-llama", (1024,) * 8),
    _short("3b-llama", "hf"),
    _short("3b-llama"),
    Setting("7b-qwen2", "hf", (2048,) * 2),
    _own("7b-qwen2", (2048,) * 4),
    _own("7b-qwen2", (2048,) * 4, limit_gib=16.0),
    _own("7b-qwen2", (2048,) * 4, limit_gib=9.0, method="qlora"),
    _own("7b-qwen2", (512,) * 8),
    Setting("8b-llama", "hf", (2048,) * 2),
    Setting("8b-qwen3", "hf", (2048,) * 2),
    _own("8b-qwen3", (2048,) * 2),
    _short("8b-qwen3"),
    Setting("1.7b-qwen3", "hf", (2048,) * 2),
    _own("1.7b-qwen3", (256, 400, 512, 640, 700, 900, 1200, 1800), trained_share=0.3),
    Setting("2b-gemma2", "hf", (2048,) * 2),
    Setting("3b-starcoder2", "hf", (2048,) * 2),
    Setting("1.4b", "hf", DEMO, trained_share=0.25),
    _own("8b-llama", (4096,) * 2),
)
"""In this order, so that what the budget leaves out is not all of one kind."""

PROBED = tuple(
    Setting(model, engine, lengths, trained_share=share, layers=layers)
    for model in ("135m", "1.4b", "7b-qwen2", "3b-llama", "1.7b-qwen3")
    for engine in ("graft", "hf")
    for lengths, share in (((128,) * 8, 0.25), ((2048,) * 2, 1.0))
    for layers in (4, 2)
)
"""What a probe of these shapes would time."""

FAMILIES = tuple(
    Setting(model, engine, lengths, trained_share=share, layers=8)
    for model in (
        "2b-gemma2",
        "1b-gemma3",
        "3b-starcoder2",
        "2b-granite",
        "3.8b-phi3",
        "1b-olmo2",
        "3b-smollm3",
        "7b-cohere",
        "7b-mistral",
    )
    for lengths, share in (((2048,) * 2, 1.0), ((140,) * 8, 0.25))
    for engine in ("graft", "hf")
)
"""Eight layers of real widths of every family, both engines, long and short rows."""


def config_of(setting: Setting) -> dict[str, Any]:
    config = dict(CONFIGS[setting.model])
    return {**config, "num_hidden_layers": setting.layers} if setting.layers else config


def make_model(setting: Setting, device: str) -> Any:
    """The decoder with random weights, made where it will work."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(setting)
    kind = config.pop("model_type")
    made = AutoConfig.for_model(kind, **config, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    made.use_cache = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(before)


def prepare_hf(setting: Setting, device: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """transformers + PEFT: bf16 weights, float32 adapters, autocast, fused AdamW; rows padded alike."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        make_model(setting, device), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    ).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=device == "cuda")
    rows, longest = len(setting.lengths), max(setting.lengths)
    tokens = torch.randint(3, 1000, (rows, longest), device=device)
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    for row, length in enumerate(setting.lengths):
        labels[row, : length - round(length * setting.trained_share)] = -100
        labels[row, length:] = -100
        mask[row, length:] = 0
    padded = {"attention_mask": mask} if min(setting.lengths) < longest else {}

    def step() -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=labels, **padded).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, {
        "trainable": sum(parameter.numel() for parameter in learned),
        "attention": model.config._attn_implementation,
    }


def prepare_graft(setting: Setting, device: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Graft's own step as the planner tunes it and `graft train` takes it: recorded, not compiled."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach
    from graftwork.model.shape import linear_names, shape_of
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import TrainSettings

    shape = shape_of(config_of(setting), name=setting.model)
    tuning = tune(setting, shape)
    model = make_model(setting, device).eval().requires_grad_(False)
    settings = TrainSettings(method=setting.method, rank=RANK, alpha=2 * RANK, max_grad_norm=1.0)
    frozen = load_quantized(model, tuning, device=device)
    names = AdapterShape(
        rank=RANK, alpha=2 * RANK, targets=linear_names(shape), layers=tuple(range(shape.layers))
    )
    parameters = attach(model, names, seed=1)
    engine = GpuEngine(model, parameters, settings=settings, frozen=frozen, tuning=tuning, shape=shape)
    rows = make_rows(setting, shape.vocab_size)
    release(device)
    begun = time.perf_counter()
    settled = engine.settle(rows)
    wait(device)
    settling = time.perf_counter() - begun

    def step() -> Any:
        found = engine.backward(rows)
        engine.apply(1e-4)
        return found.loss

    return step, {
        "tuning": settled.model_dump(),
        "settle_seconds": round(settling, 2),
        "trainable": sum(parameter.numel() for parameter in parameters),
    }


def tune(setting: Setting, shape: Any) -> Any:
    from graftwork.costmodel.gpu_tuning import TuningRequest, choose_tuning
    from graftwork.model.shape import adapter_parameters, linear_names, total_parameters
    from graftwork.plan.catalog.hardware import default_rates

    request = TuningRequest(
        method=setting.method,
        adapted=shape.layers,
        trainable=adapter_parameters(shape, rank=RANK, targets=linear_names(shape), layers=shape.layers),
        step_tokens=max(setting.room, sum(setting.lengths)),
        longest=max(setting.lengths),
        eight=setting.fp8 and total_parameters(_whole_shape(setting)) >= 1e9,
        compile="off",
    )
    found = choose_tuning(shape, request, limit_gib=setting.limit_gib, rates=default_rates())
    if found is None:
        raise RuntimeError("the planner finds no tuning that fits")
    return found


def _whole_shape(setting: Setting) -> Any:
    from graftwork.model.shape import shape_of

    return shape_of(CONFIGS[setting.model], name=setting.model)


def make_rows(setting: Setting, vocabulary: int) -> list[Any]:
    from graftwork.train.probe_process import make_rows as make

    return [
        make(
            1,
            length=length,
            vocabulary=vocabulary,
            trained_from=max(1, length - round(length * setting.trained_share)),
        )[0]
        for length in setting.lengths
    ]


def wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give back what the last setting left, and lift its limit."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure(setting: Setting, device: str, *, profiled: bool) -> dict[str, Any]:
    import torch

    begun = time.perf_counter()
    prepare = prepare_hf if setting.engine == "hf" else prepare_graft
    step, facts = prepare(setting, device)
    wait(device)
    ready = time.perf_counter()
    losses = [step() for _ in range(WARM_UP)]
    wait(device)
    warm = time.perf_counter()
    seconds = []
    for _ in range(TIMED):
        began = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - began)
    found = {
        "measured": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "load_seconds": round(ready - begun, 2),
        "warm_up_seconds": round(warm - ready, 2),
        "loss": losses[0],
        **facts,
    }
    if device == "cuda":
        found["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
        if profiled:
            try:
                found["kernels"] = profile(step)
            except Exception as error:
                found["kernels_error"] = repr(error)[:200]
    return found


def profile(step: Callable[[], Any]) -> dict[str, Any]:
    """Kernels of one step: how many and how many milliseconds, by groups; and the ten that take longest."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for event in prof.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        name, spent = event.name(), event.duration_ns() / 1e6
        group = next(
            (group for group, pattern in KERNELS.items() if re.search(pattern, name, re.I)), "elementwise"
        )
        counts[group] += 1
        busy[group] += spent
        longest[name[:90]] += spent
    return {
        "count": dict(counts),
        "busy_ms": {group: round(spent, 3) for group, spent in busy.items()},
        "longest_ms": {name: round(spent, 3) for name, spent in longest.most_common(10)},
    }


def measure_host(device: str) -> dict[str, Any]:
    """What the machine reaches by itself."""
    import torch
    import transformers

    from graftwork.model import probe

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "launch_seconds": probe.measure_launch(device=device),
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["copy_bytes_s"] = probe.measure_copy(device=device)
        found["transfers"] = probe.measure_transfers()._asdict()
        found["products"] = measure_products()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found["cpu"] = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return found


def measure_products() -> list[dict[str, Any]]:
    """Single products of the shapes, few and many tokens, in 16 and 8 bits."""
    from graftwork.model import probe
    from graftwork.model.shape import shape_of

    return [
        rate.model_dump()
        for name in ("135m", "1.4b", "7b-qwen2")
        for rate in probe.measure_products(
            shape_of(CONFIGS[name], name=name), device="cuda", eight=name != "135m"
        )
    ]


def measure_run() -> dict[str, Any]:
    """A whole `graft train` of the demo's log on the embedded base: what the plan said, what it took."""
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        project = Path(folder) / "project"
        example = ROOT / "examples" / "cited_answers"
        shutil.copytree(example, project, ignore=shutil.ignore_patterns(".graft", "*.html"))
        file = project / "graft.yaml"
        text = re.sub(r"  upper_layers:.*\n", "", file.read_text())
        text = re.sub(r"max_rows:.*", "max_rows: 780", text)
        file.write_text(re.sub(r"rehearse_crash:.*", "rehearse_crash: false", text))
        command = [sys.executable, "-m", "graftwork.cli.main", "train", "--project", str(project)]
        begun = time.perf_counter()
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False, env=environment
        )
        wall = time.perf_counter() - begun
        found: dict[str, Any] = {"wall_seconds": round(wall, 1), "rc": done.returncode}
        if done.returncode:
            found["error"] = (done.stderr or done.stdout)[-1500:]
        else:
            command[3:4] = ["plan", "residuals", "--json"]
            shown = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False, env=environment
            )
            found["residuals"] = json.loads(shown.stdout)["runs"]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("times.jsonl"))
    parser.add_argument("--budget-seconds", type=float, default=225)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="*", help="settings whose name contains one of these")
    parser.add_argument("--families", action="store_true", help="both engines on every family")
    parser.add_argument("--no-probe", action="store_true")
    parser.add_argument("--no-run", action="store_true")
    asked = parser.parse_args()
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("passed over: this needs a GPU")
        return
    begun = time.perf_counter()

    def write(line: dict[str, Any]) -> None:
        line["at_second"] = round(time.perf_counter() - begun, 1)
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = f"{1000 * line['measured']:.1f} ms" if "measured" in line else line.get("error", "")[:200]
        if "reserved_gib" in line:
            planned = line.get("tuning", {}).get("peak_gib")
            shown += f", {line['reserved_gib']:.2f} GiB reserved" + (
                f", {planned:.2f} planned" if planned else ""
            )
        print(f"{line['at_second']:>6} s  {line['name']:<52} {shown}", flush=True)

    host: dict[str, Any] = {"name": "host"}
    try:
        host |= measure_host(asked.device)
    except Exception as error:
        host["error"] = repr(error)[:500]
    write(host)
    chosen = [*FAMILIES] if asked.families else [*SETTINGS, *(() if asked.no_probe else PROBED)]
    if asked.only:
        chosen = [setting for setting in chosen if any(part in setting.name for part in asked.only)]
    run_at = -1 if asked.no_run or asked.only or asked.families else len(SETTINGS)
    for at, setting in enumerate(chosen):
        if at == run_at:
            write({"name": "graft train, the demo's log", **_guarded(measure_run)})
        if time.perf_counter() - begun > asked.budget_seconds:
            write({"name": setting.name, "error": "left out: the time was spent"})
            continue
        line = {
            "name": setting.name,
            "setting": setting._asdict(),
            "config": config_of(setting),
            **_guarded(lambda setting=setting: measure(setting, asked.device, profiled=not setting.layers)),
        }
        write(line)
        release(asked.device)


def _guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One setting that fails must not cost the others."""
    try:
        return work()
    except Exception as error:
        return {"error": repr(error)[-800:]}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
