"""How a micro-batch of the plain step is set, for the engine and the card in question. Pure.

In: a question and how the work is shared. Out: a PlainSetup. What our own plain step does stands in
docs/training.md; what transformers and PEFT do by default, in their sources.
"""

from graftwork.records.fit import FitQuestion, PlainSetup, Precision, Sharding

WRITTEN_OUT = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Families whose step on a card is our own; a test compares the list with the trainer's."""


def half_precision(question: FitQuestion) -> Precision:
    """bfloat16 where the card has it, else float16 with scaling; processors work in float32."""
    gpu = question.machine.gpu
    if gpu is None:
        cpu = question.machine.cpu
        return "bfloat16" if cpu is not None and cpu.half_gflops else "float32"
    return "bfloat16" if gpu.has_bf16 else "float16"


def why_plain(question: FitQuestion) -> str | None:
    """Why `graft train` would not take its own step on a card; None where it does."""
    gpu, shape = question.machine.gpu, question.shape
    if gpu is None:
        return "there is no card"
    if not gpu.has_bf16:
        return f"{gpu.name} has no bfloat16: it is older than Ampere"
    if question.method not in ("lora", "qlora"):
        return f"method {question.method} is trained on the plain path"
    if question.architecture not in WRITTEN_OUT:
        return f"blocks of the family {question.architecture} are not written out"
    if shape.hidden_size % 64 or shape.intermediate_size % 64:
        return "its widths are no multiples of 64"
    return None


def plain_setup(
    question: FitQuestion, *, sharding: Sharding, rows: int, tokens: int, checkpointed: int
) -> PlainSetup:
    """One pass of `rows` rows of `tokens` tokens."""
    graft, full = question.engine == "graft", question.method == "full"
    half = half_precision(question)
    weights: Precision = half
    if full:
        # Learned weights stand in float32; DeepSpeed keeps that copy apart and computes in 16 bits.
        weights = half if not graft and sharding in ("zero2", "zero3") else "float32"
    return PlainSetup(
        method=question.method,
        rank=question.rank,
        targets=question.targets,
        adapted_layers=question.adapted_layers,
        dtype=weights,
        # Our own plain step mixes precisions only on one card where the weights themselves are learned.
        autocast=half != "float32" and not (graft and full and sharding != "none"),
        rows=rows,
        tokens=tokens,
        checkpointed=checkpointed,
        optimizer=question.optimizer,
        kbit_upcast=not graft and question.method == "qlora",
    )
