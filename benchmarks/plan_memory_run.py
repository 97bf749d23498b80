"""One configuration of `plan_memory.py`, in a process of its own: what a card's memory really held.

In: a configuration as JSON. Out: one line of JSON: peaks of the allocator over the steps and by phase,
seconds per step, or that it ran out.
Weights are random: memory does not depend on them.
"""

import gc
import json
import os
import statistics
import sys
import time
from typing import Any

from graftwork.records.base import GIB

SMALL = 10**6
"""Elements of a tensor on the host that are written: larger ones are pages of zeros."""
STEPS, WARM_UP, TIMED = 3, 3, 6


def measure(configuration: dict[str, Any], *, device: str = "cuda") -> dict[str, Any]:
    """Build the engine, take steps, read the allocator. Running out is an answer, not an error."""
    import torch

    on_gpu = device.startswith("cuda")
    if on_gpu and configuration["cap_gib"]:
        total = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(configuration["cap_gib"] / total)
    peaks: dict[str, float] = {}
    found: dict[str, Any] = {"phases": peaks, "ran_out": False}
    try:
        _run(configuration, found, device=device)
    except RuntimeError as error:
        from graftwork.train.gpu.decoder import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        found |= {"ran_out": True, "word": str(error).splitlines()[0][:300]}
    return found


def _run(configuration: dict[str, Any], found: dict[str, Any], *, device: str) -> None:
    import torch

    on_gpu = device.startswith("cuda")
    meter = Meter(on_gpu, found["phases"])
    engine = make_engine(configuration, meter, device=device)
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found["before_gib"] = [torch.cuda.memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB]
        free, total = torch.cuda.mem_get_info()
        found["beside_allocator_gib"] = (total - free - torch.cuda.memory_reserved()) / GIB
    meter.reset()
    seconds = []
    count = WARM_UP + TIMED if configuration.get("timed") else STEPS + (2 if configuration["compiled"] else 0)
    for number in range(count):
        rows = make_rows(configuration, seed=number)
        begun = time.perf_counter()
        loss = engine.backward(rows).loss
        meter.note("backward")
        engine.apply(1e-4)
        if on_gpu:
            torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - begun)
        meter.note("optimizer")
    found["loss"] = loss
    found["allocated_gib"], found["reserved_gib"] = meter.allocated / GIB, meter.reserved / GIB
    if on_gpu:
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        found["after_gib"] = [torch.cuda.memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB]
    if configuration.get("timed"):
        found["seconds_per_step"] = statistics.median(seconds)
        found["tokens_per_step"] = configuration["rows"] * configuration["length"]


class Meter:
    """The allocator's peaks, by phase and in all."""

    def __init__(self, on_gpu: bool, phases: dict[str, float]) -> None:
        self._on_card, self._phases = on_gpu, phases
        self.allocated = self.reserved = 0
        self._forward = False

    def note(self, phase: str) -> None:
        """The peak since the last note belongs to this phase."""
        if not self._on_card:
            return
        import torch

        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self._phases[phase] = max(self._phases.get(phase, 0.0), allocated / GIB)
        self.allocated, self.reserved = max(self.allocated, allocated), max(self.reserved, reserved)
        torch.cuda.reset_peak_memory_stats()

    def reset(self) -> None:
        if self._on_card:
            import torch

            torch.cuda.reset_peak_memory_stats()
        self.allocated = self.reserved = 0

    def progress(self, word: str = "", *_: Any) -> None:
        """The engine says what begins: with its backward pass the forward pass has ended."""
        if word == "backward" and self._forward:
            self.note("forward")
        self._forward = word == "forward"


def make_engine(configuration: dict[str, Any], meter: Meter, *, device: str) -> Any:
    """As a run makes it: weights from the host, block by block; adapters; the levels as they are asked."""
    import torch
    from plan_memory_shapes import shape_of, tuning_of

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import make_trainable
    from graftwork.train.engine import StepOptions, TrainingEngine
    from graftwork.train.engine_choice import autocast_logits
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import load_quantized
    from graftwork.train.settings import ALL_LINEARS, TrainSettings

    method, layers = configuration["method"], configuration["layers"]
    settings = TrainSettings(method=method, rank=configuration["rank"], alpha=2 * configuration["rank"])
    adapter = AdapterShape(
        kind="full" if method == "full" else "lora",
        rank=configuration["rank"],
        alpha=2 * configuration["rank"],
        targets=ALL_LINEARS,
        layers=tuple(range(layers)),
    )
    if method == "full":
        model = make_model(configuration, dtype=torch.float32, device=device)
        meter.note("load")
        learned = make_trainable(model, adapter, seed=1)
        step = StepOptions(logits=autocast_logits(model, settings, dtype="bfloat16"))
        return TrainingEngine(model, learned, settings=settings, step=step, progress=meter.progress)
    model = make_model(configuration, dtype=torch.bfloat16, device="cpu")
    tuning = tuning_of(configuration)
    frozen = load_quantized(model, tuning, device=device)
    randomise(model, frozen)
    meter.note("load")
    learned = make_trainable(model, adapter, seed=1)
    engine = GpuEngine(
        model,
        learned,
        settings=settings,
        frozen=frozen,
        tuning=tuning,
        shape=shape_of(configuration),
        progress=meter.progress,
    )
    engine._use(tuning)
    meter.note("attach")
    return engine


def make_model(configuration: dict[str, Any], *, dtype: Any, device: str) -> Any:
    """A model whose weights nobody has written: on the host its pages are not even there until read."""
    import torch
    from plan_memory_shapes import DECODERS
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = DECODERS[configuration["model"]]
    config = AutoConfig.for_model(
        numbers.family,
        hidden_size=numbers.hidden,
        num_hidden_layers=configuration["layers"],
        num_attention_heads=numbers.heads,
        num_key_value_heads=numbers.kv_heads,
        head_dim=numbers.head_dim,
        intermediate_size=numbers.inner,
        vocab_size=numbers.vocabulary,
        tie_word_embeddings=numbers.tied,
        max_position_embeddings=32768,
        **({"sliding_window": None} if numbers.family == "mistral" else {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if numbers.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif device != "cpu" or parameter.numel() < SMALL:
            parameter.normal_(std=0.02)
    return model


def randomise(model: Any, frozen: Any) -> None:
    """Numbers in place of what was never written: products of zeros would be faster than real ones."""
    import torch

    from graftwork.train.gpu.linear import EightBitWeight, FourBitWeight, WholeWeight

    if (table := model.model.embed_tokens.weight).device.type != "cpu":
        table.normal_(std=0.02)
    blocks, head = frozen
    weights = [part for block in blocks for part in block.values()] + [head]
    for one in weights:
        if isinstance(one, WholeWeight):
            one.weight.normal_(std=0.02)
        elif isinstance(one, EightBitWeight):
            # Sign, exponents below one, mantissa: any such byte is a small number.
            codes = one.codes.view(torch.uint8).random_(0, 256).bitwise_and_(0xB7)
            if one.turned is not None:
                one.turned.view(torch.uint8).copy_(codes.t())
            one.scale.fill_(0.05)
        elif isinstance(one, FourBitWeight):
            for part in one.parts:
                part.codes.random_(0, 256)
                part.scale_codes.zero_()
                part.offset.fill_(0.04)


def make_rows(configuration: dict[str, Any], *, seed: int) -> list[Any]:
    import numpy as np
    from plan_memory_shapes import DECODERS, lengths_of, trained_from

    from graftwork.records.dataset import Row
    from graftwork.records.interaction import Message, Origin

    chance = np.random.default_rng(seed)
    vocabulary = DECODERS[configuration["model"]].vocabulary
    return [
        Row.model_construct(
            id=str(at),
            origin=Origin(file="random", line=1),
            messages=(Message(role="user", content=""),),
            reply="",
            tokens=tuple(chance.integers(0, vocabulary, length).tolist()),
            trained_from=trained_from(configuration, length),
        )
        for at, length in enumerate(lengths_of(configuration))
    ]


def main() -> None:
    configuration = json.loads(sys.argv[1])
    word = "expandable_segments:True" if configuration["expandable"] else "expandable_segments:False"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = word
    os.environ["HF_HUB_OFFLINE"] = "1"
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
    print(json.dumps(measure(configuration, device=device)), flush=True)


if __name__ == "__main__":
    main()
