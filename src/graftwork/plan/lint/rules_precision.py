"""Rules about what the card can multiply. Pure."""

from collections.abc import Iterator

from graftwork.plan.lint.facts import (
    Configuration,
    LintContext,
    RuleHit,
    a,
    rule,
)

AMPERE = 8.0
TURING = 7.5
VOLTA = 7.0
WHEELS = "pytorch issues 157517 (2.8: Pascal) and 172352 (2.11: Volta), read 2026-11"


@rule("both-halves", "error")
def both_halves_are_on(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Bf16 and fp16 at once."""
    if config.both_halves:
        yield RuleHit(
            "bf16 and fp16 are both switched on",
            "trainers refuse to start with both",
            "keep bf16 where the card has it, else fp16",
            ("both_halves",),
        )


@rule("bf16-missing", "error")
def bf16_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Bfloat16 on a card without it."""
    gpu = context.gpu
    if gpu is None or gpu.has_bf16 or "bfloat16" not in (config.precision, config.compute_dtype):
        return
    field = "precision" if config.precision == "bfloat16" else "compute_dtype"
    yield RuleHit(
        f"bfloat16 on {a(gpu.name)}, which does not have it (compute capability {gpu.capability:g})",
        "it is refused, or emulated in software many times slower",
        "use fp16 with loss scaling, or a card of compute capability 8.0 or later",
        (field, "gpu"),
    )


@rule("flash-attention-missing", "error", "flash-attn README: Ampere, Ada or Hopper")
def flash_attention_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Flash Attention 2 before Ampere."""
    if config.flash_attention and context.gpu is not None and context.gpu.capability < AMPERE:
        yield RuleHit(
            f"Flash Attention 2 on {a(context.gpu.name)} (compute capability {context.gpu.capability:g})",
            "its kernels need 8.0 or later; loading the model fails",
            'use `attn_implementation: "sdpa"`, which takes the best kernel that the card has',
            ("flash_attention",),
        )


@rule("tf32-missing", "error", "transformers training_args, 5.22")
def tf32_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """TF32 before Ampere."""
    if config.tf32 and context.gpu is not None and context.gpu.capability < AMPERE:
        yield RuleHit(
            f"TF32 on {a(context.gpu.name)}, which does not have it",
            "TrainingArguments refuses it before Ampere",
            "remove `tf32`; it does nothing for half precision anyway",
            ("tf32",),
        )


@rule("fp16-where-bf16-is", "note")
def fp16_where_bf16_is(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Fp16 on a card that has bfloat16."""
    gpu = context.gpu
    if config.precision != "float16" or gpu is None or not gpu.has_bf16:
        return
    offloaded = " With the optimizer in host memory each skipped step has still moved its gradients." * (
        config.offload_optimizer
    )
    yield RuleHit(
        f"fp16 on {a(gpu.name)}, which has bfloat16",
        f"fp16 overflows at 65,504: it needs loss scaling, and steps that overflow are skipped.{offloaded}",
        "use bf16: as fast, as small, and nothing to scale",
        ("precision",),
    )


@rule("fp16-products", "warning")
def fp16_products_of_bf16_weights(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """QLoRA with fp16 products."""
    if config.bits != 4 or config.compute_dtype != "float16":
        return
    if context.gpu is not None and not context.gpu.has_bf16:
        return
    yield RuleHit(
        "four-bit weights are multiplied in fp16",
        "models of today were trained in bfloat16 and hold values beyond fp16's range: losses turn to NaN",
        "set `bnb_4bit_compute_dtype: bfloat16`",
        ("compute_dtype",),
    )


@rule("two-half-precisions", "warning")
def two_half_precisions(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """Run and products in different halves."""
    halves = {config.precision, config.compute_dtype} - {None, "float32"}
    if config.bits == 4 and len(halves) == 2:
        yield RuleHit(
            f"the run is in {config.precision}, its four-bit weights multiply in {config.compute_dtype}",
            "every layer converts between them, and the narrower range applies",
            "use the same for both",
            ("compute_dtype", "precision"),
        )


@rule("float32-products", "note", "transformers BitsAndBytesConfig: default torch.float32")
def four_bits_multiply_in_float32(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    """QLoRA whose products fall back to float32."""
    if config.bits == 4 and config.kind == "training" and config.compute_dtype is None:
        yield RuleHit(
            "nothing says what the four-bit weights are multiplied in",
            "bitsandbytes takes float32 unless `bnb_4bit_compute_dtype` is set, several times slower",
            "set it to the precision of the run",
            ("bits",),
        )


@rule("card-left-behind", "warning", WHEELS)
def card_is_left_behind(_said: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A card that today's torch has no kernels for."""
    gpu = context.gpu
    if gpu is None or gpu.capability >= TURING:
        return
    since = "2.8" if gpu.capability < VOLTA else "2.11"
    yield RuleHit(
        f"the usual wheels of torch {since} and later have no kernels for {a(gpu.name)}",
        "the run ends at its first product with `no kernel image is available`",
        "install the CUDA 12.6 wheels of torch there, as long as they are made",
        ("gpu",),
    )


@rule("no-tensor-cores", "note")
def card_has_no_tensor_cores(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Half precision that is no faster."""
    gpu = context.gpu
    if gpu is not None and gpu.capability < VOLTA and config.precision in ("float16", "bfloat16"):
        yield RuleHit(
            f"{a(gpu.name)} has no tensor cores: {gpu.half_tflops:g} TFLOPS in half precision",
            "half precision saves memory there, but hardly any time",
            f"expect {gpu.half_tflops:g} TFLOPS at best, not those of a newer card of 16 GB",
            ("precision", "gpu"),
        )


@rule("8bit-optimizer-on-processor", "error")
def eight_bit_optimizer_on_processor(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """An optimizer that needs a card."""
    if (
        context.on_processor
        and config.optimizer
        and ("8bit" in config.optimizer or "paged" in config.optimizer)
    ):
        yield RuleHit(
            f"the optimizer {config.optimizer} on a processor",
            "the 8-bit and paged optimizers of bitsandbytes need a card",
            "use `adamw_torch`; an adapter's optimizer is small",
            ("optimizer",),
        )


@rule("fp16-on-processor", "warning")
def fp16_on_processor(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Fp16 where it is slowest."""
    if context.on_processor and config.precision == "float16":
        yield RuleHit(
            "fp16 on a processor",
            "processors multiply fp16 slowly or not at all, and training in it needs loss scaling",
            "use bf16 where the processor has AVX-512 BF16 or AMX, else float32",
            ("precision",),
        )
