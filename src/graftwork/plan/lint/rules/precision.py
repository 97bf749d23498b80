"""Rules about what the card can multiply. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.facts import Around, Configuration
from graftwork.plan.lint.rule import LintRule, RuleResult
from graftwork.plan.lint.words import a

AMPERE = 8.0
TURING = 7.5
VOLTA = 7.0
WHEELS = "pytorch issues 157517 (2.8: Pascal) and 172352 (2.11: Volta), read 2026-11"


def bf16_is_missing(said: Configuration, around: Around) -> Iterator[RuleResult]:
    gpu = around.gpu
    if gpu is None or gpu.has_bf16 or "bfloat16" not in (said.precision, said.compute_dtype):
        return
    field = "precision" if said.precision == "bfloat16" else "compute_dtype"
    yield RuleResult(
        f"bfloat16 on {a(gpu.name)}, which does not have it (compute capability {gpu.capability:g})",
        "it is refused, or emulated in software many times slower",
        "use fp16 with loss scaling, or a card of compute capability 8.0 or later",
        (field, "gpu"),
    )


def both_halves_are_on(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.both_halves:
        yield RuleResult(
            "bf16 and fp16 are both switched on",
            "trainers refuse to start with both",
            "keep bf16 where the card has it, else fp16",
            ("both_halves",),
        )


def flash_attention_is_missing(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if said.flash_attention and around.gpu is not None and around.gpu.capability < AMPERE:
        yield RuleResult(
            f"Flash Attention 2 on {a(around.gpu.name)} (compute capability {around.gpu.capability:g})",
            "its kernels need 8.0 or later; loading the model fails",
            'use `attn_implementation: "sdpa"`, which takes the best kernel that the card has',
            ("flash_attention",),
        )


def tf32_is_missing(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if said.tf32 and around.gpu is not None and around.gpu.capability < AMPERE:
        yield RuleResult(
            f"TF32 on {a(around.gpu.name)}, which does not have it",
            "TrainingArguments refuses it before Ampere",
            "remove `tf32`; it does nothing for half precision anyway",
            ("tf32",),
        )


def fp16_where_bf16_is(said: Configuration, around: Around) -> Iterator[RuleResult]:
    gpu = around.gpu
    if said.precision != "float16" or gpu is None or not gpu.has_bf16:
        return
    offloaded = " With the optimizer in host memory each skipped step has still moved its gradients." * (
        said.offload_optimizer
    )
    yield RuleResult(
        f"fp16 on {a(gpu.name)}, which has bfloat16",
        f"fp16 overflows at 65,504: it needs loss scaling, and steps that overflow are skipped.{offloaded}",
        "use bf16: as fast, as small, and nothing to scale",
        ("precision",),
    )


def fp16_products_of_bf16_weights(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if said.bits != 4 or said.compute_dtype != "float16":
        return
    if around.gpu is not None and not around.gpu.has_bf16:
        return
    yield RuleResult(
        "four-bit weights are multiplied in fp16",
        "models of today were trained in bfloat16 and hold values beyond fp16's range: losses turn to NaN",
        "set `bnb_4bit_compute_dtype: bfloat16`",
        ("compute_dtype",),
    )


def two_half_precisions(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    halves = {said.precision, said.compute_dtype} - {None, "float32"}
    if said.bits == 4 and len(halves) == 2:
        yield RuleResult(
            f"the run is in {said.precision}, its four-bit weights are multiplied in {said.compute_dtype}",
            "every layer converts to and fro, and the narrower range of the two holds",
            "use the same for both",
            ("compute_dtype", "precision"),
        )


def four_bits_multiply_in_float32(said: Configuration, _around: Around) -> Iterator[RuleResult]:
    if said.bits == 4 and said.kind == "training" and said.compute_dtype is None:
        yield RuleResult(
            "nothing says what the four-bit weights are multiplied in",
            "bitsandbytes takes float32 unless `bnb_4bit_compute_dtype` is set, several times slower",
            "set it to the precision of the run",
            ("bits",),
        )


def card_is_left_behind(_said: Configuration, around: Around) -> Iterator[RuleResult]:
    gpu = around.gpu
    if gpu is None or gpu.capability >= TURING:
        return
    since = "2.8" if gpu.capability < VOLTA else "2.11"
    yield RuleResult(
        f"the usual wheels of torch {since} and later have no kernels for {a(gpu.name)}",
        "the run ends at its first product with `no kernel image is available`",
        "install the CUDA 12.6 wheels of torch there, as long as they are made",
        ("gpu",),
    )


def card_has_no_tensor_cores(said: Configuration, around: Around) -> Iterator[RuleResult]:
    gpu = around.gpu
    if gpu is not None and gpu.capability < VOLTA and said.precision in ("float16", "bfloat16"):
        yield RuleResult(
            f"{a(gpu.name)} has no tensor cores: {gpu.half_tflops:g} TFLOPS in half precision",
            "half precision saves memory there, but hardly any time",
            f"reckon with {gpu.half_tflops:g} TFLOPS at best, not with those of a newer card of 16 GB",
            ("precision", "gpu"),
        )


def eight_bit_optimizer_on_processor(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if around.on_processor and said.optimizer and ("8bit" in said.optimizer or "paged" in said.optimizer):
        yield RuleResult(
            f"the optimizer {said.optimizer} on a processor",
            "the 8-bit and paged optimizers of bitsandbytes need a card",
            "use `adamw_torch`; an adapter's optimizer is small",
            ("optimizer",),
        )


def fp16_on_processor(said: Configuration, around: Around) -> Iterator[RuleResult]:
    if around.on_processor and said.precision == "float16":
        yield RuleResult(
            "fp16 on a processor",
            "processors multiply fp16 slowly or not at all, and training in it needs loss scaling",
            "use bf16 where the processor has AVX-512 BF16 or AMX, else float32",
            ("precision",),
        )


PRECISION_RULES = (
    LintRule("both-halves", "error", "bf16 and fp16 at once", both_halves_are_on),
    LintRule("bf16-missing", "error", "bfloat16 on a card without it", bf16_is_missing),
    LintRule(
        "flash-attention-missing",
        "error",
        "Flash Attention 2 before Ampere",
        flash_attention_is_missing,
        "flash-attn README: Ampere, Ada or Hopper",
    ),
    LintRule(
        "tf32-missing", "error", "TF32 before Ampere", tf32_is_missing, "transformers training_args, 5.22"
    ),
    LintRule("fp16-where-bf16-is", "note", "fp16 on a card that has bfloat16", fp16_where_bf16_is),
    LintRule("fp16-products", "warning", "QLoRA with fp16 products", fp16_products_of_bf16_weights),
    LintRule("two-half-precisions", "warning", "run and products in different halves", two_half_precisions),
    LintRule(
        "float32-products",
        "note",
        "QLoRA whose products fall back to float32",
        four_bits_multiply_in_float32,
        "transformers BitsAndBytesConfig: default torch.float32",
    ),
    LintRule(
        "card-left-behind",
        "warning",
        "a card that today's torch has no kernels for",
        card_is_left_behind,
        WHEELS,
    ),
    LintRule("no-tensor-cores", "note", "half precision that is no faster", card_has_no_tensor_cores),
    LintRule(
        "8bit-optimizer-on-processor",
        "error",
        "an optimizer that needs a card",
        eight_bit_optimizer_on_processor,
    ),
    LintRule("fp16-on-processor", "warning", "fp16 where it is slowest", fp16_on_processor),
)
