"""Rules about what the card can multiply. Pure."""

import math
from collections.abc import Iterator

from graftwork.plan.lint.facts import (
    Configuration,
    LintContext,
    LintRule,
    RuleHit,
    a,
    count_steps,
    interval_of,
)

AMPERE = 8.0
TURING = 7.5
VOLTA = 7.0
WHEELS = "pytorch issues 157517 (2.8: Pascal) and 172352 (2.11: Volta), read 2026-11"


def bf16_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def both_halves_are_on(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.both_halves:
        yield RuleHit(
            "bf16 and fp16 are both switched on",
            "trainers refuse to start with both",
            "keep bf16 where the card has it, else fp16",
            ("both_halves",),
        )


def flash_attention_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    if config.flash_attention and context.gpu is not None and context.gpu.capability < AMPERE:
        yield RuleHit(
            f"Flash Attention 2 on {a(context.gpu.name)} (compute capability {context.gpu.capability:g})",
            "its kernels need 8.0 or later; loading the model fails",
            'use `attn_implementation: "sdpa"`, which takes the best kernel that the card has',
            ("flash_attention",),
        )


def tf32_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    if config.tf32 and context.gpu is not None and context.gpu.capability < AMPERE:
        yield RuleHit(
            f"TF32 on {a(context.gpu.name)}, which does not have it",
            "TrainingArguments refuses it before Ampere",
            "remove `tf32`; it does nothing for half precision anyway",
            ("tf32",),
        )


def fp16_where_bf16_is(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def fp16_products_of_bf16_weights(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def two_half_precisions(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    halves = {config.precision, config.compute_dtype} - {None, "float32"}
    if config.bits == 4 and len(halves) == 2:
        yield RuleHit(
            f"the run is in {config.precision}, its four-bit weights multiply in {config.compute_dtype}",
            "every layer converts between them, and the narrower range applies",
            "use the same for both",
            ("compute_dtype", "precision"),
        )


def four_bits_multiply_in_float32(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.bits == 4 and config.kind == "training" and config.compute_dtype is None:
        yield RuleHit(
            "nothing says what the four-bit weights are multiplied in",
            "bitsandbytes takes float32 unless `bnb_4bit_compute_dtype` is set, several times slower",
            "set it to the precision of the run",
            ("bits",),
        )


def card_is_left_behind(_said: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def card_has_no_tensor_cores(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    gpu = context.gpu
    if gpu is not None and gpu.capability < VOLTA and config.precision in ("float16", "bfloat16"):
        yield RuleHit(
            f"{a(gpu.name)} has no tensor cores: {gpu.half_tflops:g} TFLOPS in half precision",
            "half precision saves memory there, but hardly any time",
            f"expect {gpu.half_tflops:g} TFLOPS at best, not those of a newer card of 16 GB",
            ("precision", "gpu"),
        )


def eight_bit_optimizer_on_processor(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
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


def fp16_on_processor(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    if context.on_processor and config.precision == "float16":
        yield RuleHit(
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


CONFIDENCE = 0.95


def data_came_from_another(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.model and config.data_model and not same_model(config.model, config.data_model):
        yield RuleHit(
            f"the rows were written by {config.data_model}, and {config.model} is trained on them",
            "this is distillation: the rate that the logs show is the other model's, and its template, "
            "reasoning and tool calls may not be this one's",
            f"measure {config.model} untrained on the held-out rows first, and compare with that",
            ("data_model", "model"),
        )


def another_is_deployed(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.model and config.deployed_model and not same_model(config.model, config.deployed_model):
        yield RuleHit(
            f"the adapter is trained on {config.model}, but {config.deployed_model} is what is served",
            "an adapter fits the very weights that it was trained on; on others it is noise or does not load",
            "train on the model that is served, or serve the one that is trained on",
            ("deployed_model", "model"),
        )


def rate_cannot_be_proven(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.target_rate is None or config.test_rows is None or not 0 < config.target_rate < 1:
        return
    tail = (1 - CONFIDENCE) / 2
    best = tail ** (1 / config.test_rows)
    if best >= config.target_rate:
        return
    needed = math.ceil(math.log(tail) / math.log(config.target_rate))
    yield RuleHit(
        f"{config.test_rows} held-out rows cannot prove {config.target_rate:.1%}",
        f"with every one of them right, the exact 95 % interval still begins at {best:.1%}",
        f"hold out {needed} rows or more, or ask for {math.floor(best * 100)} %",
        ("target_rate", "test_rows"),
    )


def spot_without_checkpoints(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if not config.spot:
        return
    steps, every = count_steps(config), interval_of(config.save_when, config.save_steps)
    never = steps is not None and every is not None and every >= steps.total
    if config.save_when == "no" or never:
        yield RuleHit(
            "the place can be taken away at any time, and no checkpoint is made before the end",
            "each interruption starts the run from nothing",
            "save every few minutes: `graft plan compare` computes the best interval for the place",
            ("save_steps", "save_when", "spot"),
        )


def spot_without_mirror(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.spot and config.mirror is None:
        yield RuleHit(
            "the place can be taken away at any time, and checkpoints stay on its own disk",
            "with the machine its disk can go, and the checkpoints with it",
            "copy them out as they are made (`train.run.mirror: s3://…` in graft.yaml)",
            ("spot",),
        )


def deadline_comes_first(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    if config.deadline_minutes is None or config.expected_minutes is None:
        return
    if config.expected_minutes > config.deadline_minutes:
        yield RuleHit(
            f"the run takes {_hours(config.expected_minutes)} {_by(config)}, and the place is gone after "
            f"{_hours(config.deadline_minutes)}",
            "it needs several sessions: each ends with a checkpoint and begins with it, or starts over",
            "resume from a mirror in the next session, train on fewer rows, or take a longer session",
            ("deadline_minutes", "expected_minutes"),
        )


def template_was_not_filled_in(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    for key, value in config.unfilled.items():
        yield RuleHit(
            f"{key} still holds the placeholder {value!r}",
            "it is used as it is, and fails when it is first used, maybe at the end of the run",
            "fill it in, or remove it",
            (f"={key}",),
        )


def number_is_a_text(config: Configuration, _context: LintContext) -> Iterator[RuleHit]:
    for key, value in config.texts_for_numbers.items():
        mantissa, exponent = value.lower().split("e")
        mantissa = mantissa if "." in mantissa else f"{mantissa}.0"
        sign = exponent if exponent[0] in "+-" else f"+{exponent}"
        yield RuleHit(
            f"{key}: {value} is a text to YAML 1.1, not a number",
            "PyYAML wants a point and a sign; a script that does not convert it fails when it compares",
            f"write {mantissa}e{sign}",
            (f"={key}",),
        )


def same_model(one: str, other: str) -> bool:
    """By the last part of the name: an organisation before it, case and underscores do not matter."""

    def plain(name: str) -> str:
        return name.rstrip("/").split("/")[-1].lower().replace("_", "-")

    return plain(one) == plain(other)


def _by(config: Configuration) -> str:
    return "as stated" if "expected_minutes" in config.places else "or more, as estimated"


def _hours(minutes: float) -> str:
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"


PURPOSE_RULES = (
    LintRule("data-from-another-model", "warning", "rows that another model wrote", data_came_from_another),
    LintRule(
        "another-is-deployed", "error", "an adapter for another model than is served", another_is_deployed
    ),
    LintRule(
        "rate-cannot-be-proven",
        "warning",
        "a goal that so few held-out rows cannot show",
        rate_cannot_be_proven,
        "exact binomial interval (Clopper and Pearson 1934), all cases right",
    ),
    LintRule("spot-without-checkpoints", "error", "a spot place and nothing saved", spot_without_checkpoints),
    LintRule(
        "spot-without-mirror", "warning", "a spot place and checkpoints on its disk", spot_without_mirror
    ),
    LintRule("deadline-comes-first", "error", "a session shorter than the run", deadline_comes_first),
    LintRule("placeholder", "error", "a value of a template", template_was_not_filled_in),
    LintRule("number-is-a-text", "warning", "2e-4, which YAML 1.1 reads as a text", number_is_a_text),
)
