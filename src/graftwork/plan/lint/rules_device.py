"""Rules about what the device can hold and multiply, and what a run needs by the planner.

Input: a configuration and its context, which has been checked against the catalog. Output: findings, and the
bytes of weights and optimizer states that they compare.
"""

from collections.abc import Iterator
from typing import NamedTuple

from graftwork.costmodel.plain_step import plain_peak
from graftwork.model.shape import linear_names
from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.question import CONTEXT_GIB, make_question
from graftwork.plan.lint.configuration import (
    Configuration,
    LintContext,
    Peaks,
    RuleHit,
    a,
    effective_batch,
    rule,
)
from graftwork.records.base import ELEMENT_BYTES, GIB, NF4_BYTES
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.plan import FitOptions, PlainSetup

PLAIN = ("training", "axolotl", "llama-factory")
"""Kinds whose step is that of transformers and PEFT."""


def peaks_of(config: Configuration, model: CatalogModel, lengths: tuple[int, ...]) -> Peaks | None:
    """GiB of one GPU at the longest row within the limit."""
    # The type of the weights: as they are loaded, else as the run multiplies.
    dtype = config.weights_dtype or config.precision
    sharded = config.zero_stage or config.offload_optimizer or config.offload_weights
    if config.kind not in PLAIN or sharded or config.method is None or dtype is None:
        return None
    if config.max_length is None or config.micro_batch is None or config.bits == 8:
        return None
    names = linear_names(model.shape)
    targets = tuple(name for name in config.targets or names if name in names) or names
    setup = PlainSetup(
        method=config.method,
        rank=config.rank or 16,
        targets=targets,
        adapted_layers=model.shape.layers,
        dtype=dtype,
        autocast=config.precision in ("bfloat16", "float16"),
        rows=config.micro_batch,
        tokens=min(config.max_length, max(lengths, default=config.max_length)),
        checkpointed=model.shape.layers if config.recompute else 0,
    )
    as_set = plain_peak(model.shape, setup, architecture=model.architecture)
    every = setup.model_copy(update={"checkpointed": model.shape.layers})
    recomputed = plain_peak(model.shape, every, architecture=model.architecture)
    # No allocator counts what CUDA itself takes.
    _, context, _ = CONTEXT_GIB
    return Peaks(
        as_set=as_set.allocated / GIB + context,
        recomputed=recomputed.allocated / GIB + context,
        tokens=setup.tokens,
    )


def least_minutes(
    config: Configuration, model: CatalogModel, gpu: Gpu, lengths: tuple[int, ...]
) -> float | None:
    """Lower bound of the run's minutes on these GPUs, with the best settings for it."""
    if config.rows is None or config.method is None or not lengths:
        return None
    clipped = [min(length, config.max_length or length) for length in lengths]
    options = FitOptions(
        method=config.method,
        engine="graft" if config.kind == "graft" else "hf",
        seq=clipped[0] if len(clipped) == 1 else tuple(clipped),
        rows=config.rows,
        epochs=config.epochs or 1.0,
        batch_size=effective_batch(config) or 16,
        rank=config.rank or 16,
    )
    machine = Machine(gpu=gpu, gpus=config.gpus or 1, ram_gib=config.ram_gib or 64.0)
    answer = fit(make_question(model, options, machine=machine))
    return answer.run_minutes.low if answer.fits else None


HOST_OFFLOAD = 16.0
"""Bytes per parameter in host memory with the optimizer offloaded: fp32 weights, moments, gradients."""
HOST_OFFLOAD_PADDED = 1.5
"""Factor of DeepSpeed's own estimate on that, for its buffers."""


class LoadedWeights(NamedTuple):
    gib: float
    form: str
    """Their format, for messages."""


def weights_of(config: Configuration, context: LintContext) -> LoadedWeights | None:
    """Only the weights, as the configuration loads them."""
    if context.parameters is None:
        return None
    if config.bits == 4 or config.method == "qlora":
        whole = 0
        if context.shape is not None:
            tables = 1 if context.shape.tied_embeddings else 2
            whole = context.shape.vocab_size * context.shape.hidden_size * tables
        gib = ((context.parameters - whole) * NF4_BYTES + whole * 2) / GIB
        return LoadedWeights(gib, "four bits")
    if config.bits == 8:
        return LoadedWeights(context.parameters / GIB, "eight bits")
    dtype = config.weights_dtype or config.precision
    if dtype is None:
        return None
    return LoadedWeights(context.parameters * ELEMENT_BYTES[dtype] / GIB, dtype)


def full_floor(config: Configuration, context: LintContext) -> tuple[float, str] | None:
    """GiB that a GPU needs at least if all weights are trained, without any activation; and what they consist
    of.
    """
    if config.method != "full" or context.parameters is None:
        return None
    gpus, stage = config.gpus or 1, config.zero_stage or 0
    if config.precision == "float32":
        weights, gradients, optimizer = 4.0, 4.0, 8.0
    elif stage:
        # DeepSpeed keeps float32 weights and moments in addition to those of 16 bits.
        weights, gradients, optimizer = 2.0, 2.0, 12.0
    else:
        weights, gradients, optimizer = 2.0, 2.0, 4.0
    if config.offload_optimizer:
        optimizer = 0.0
        # Gradients travel as they are made; those of one layer at a time stay.
        gradients = 0.0 if stage >= 2 else gradients
    if config.offload_weights and stage == 3:
        weights = 0.0
    parts = {
        "weights": weights / (gpus if stage >= 3 else 1),
        "gradients": gradients / (gpus if stage >= 2 else 1),
        "optimizer": optimizer / (gpus if stage >= 1 else 1),
    }
    terms = [f"{name} {size:g}" for name, size in parts.items() if size]
    explanation = f"bytes per parameter and GPU: {' + '.join(terms) or 'none'}"
    return sum(parts.values()) * context.parameters / GIB, explanation


GENEROUS = 1.1
"""A stated figure counts as correct up to this ratio: GB and GiB differ by 7 %."""
HARDLY = 0.7
"""Share of a GPU above which weights leave too little for activations, buffers and the context."""
FIT = "`graft plan fit` shows what does fit"


@rule("weights-larger-than-stated", "error")
def weights_are_larger(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Weights that take more than stated."""
    weights = weights_of(config, context)
    stated = config.stated_weights_gb
    if weights is None or stated is None or weights.gib <= stated * GENEROUS:
        return
    # The most common slip: the size of the files taken for that of the weights in float32.
    half = 2 * (context.parameters or 0) / GIB
    slip = half / GENEROUS <= stated <= half * GENEROUS
    yield RuleHit(
        f"{_billions(context)} parameters in {weights.form} are {weights.gib:.1f} GiB, not {stated:g} GB",
        f"the weights alone are {weights.gib / stated:.1f} times what was assumed"
        + (f"; {stated:g} GB is what they are in 16 bits" if slip else ""),
        _smaller(context, stated),
        ("stated_weights_gb", "weights_dtype", "precision"),
    )


@rule("memory-larger-than-stated", "error")
def memory_is_larger(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Training that takes more than stated."""
    weights = weights_of(config, context)
    stated = config.stated_memory_gb
    if weights is None or stated is None or weights.gib <= stated:
        return
    yield RuleHit(
        f"training is stated to take {stated:g} GB, but the weights alone are {weights.gib:.1f} GiB",
        f"{_billions(context)} parameters in {weights.form}; gradients, optimizer and activations are extra",
        f"{_smaller(context, stated)}; {FIT}",
        ("stated_memory_gb",),
    )


@rule("weights-do-not-fit", "error")
def weights_do_not_fit(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Weights larger than the GPU or the memory."""
    weights = weights_of(config, context)
    if weights is None or config.method == "full":
        return
    sharded = config.gpus if config.zero_stage == 3 and config.gpus else 1
    if context.gpu is not None and not config.offload_weights:
        room, what = context.gpu.memory_gib * sharded, context.gpu.name
    elif context.on_cpu and config.ram_gib is not None:
        room, what = config.ram_gib, "this machine"
    else:
        return
    if weights.gib > room:
        yield RuleHit(
            f"the weights in {weights.form} are {weights.gib:.1f} GiB, {what} has {room:.1f}",
            "it ends before the first step",
            f"{_smaller(context, room)}; {FIT}",
            ("weights_dtype", "precision", "bits", "model", "gpu"),
        )


@rule("full-does-not-fit", "error", "ZeRO, arXiv 1910.02054, section 3")
def full_does_not_fit(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """All weights trained where that cannot be."""
    floor = full_floor(config, context)
    if floor is None or context.gpu is None or floor[0] <= context.gpu.memory_gib:
        return
    least, explanation = floor
    gpus = config.gpus or 1
    pooled = (
        f" ZeRO-{config.zero_stage or 0} keeps the whole weights on every GPU: {gpus} GPUs are not one of "
        f"{gpus} times the size."
        if gpus > 1 and (config.zero_stage or 0) < 3
        else ""
    )
    yield RuleHit(
        f"training all of {_billions(context)} parameters takes {least:.1f} GiB a GPU before any "
        f"activation; {a(context.gpu.name)} has {context.gpu.memory_gib:.1f}",
        f"{explanation}.{pooled}",
        f"train an adapter (qlora), or ZeRO-3 with weights and optimizer in host memory; {FIT}",
        ("method", "zero_stage", "precision", "model", "gpu"),
    )


@rule("full-hardly-fits", "warning")
def full_hardly_fits(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """All weights trained with nearly nothing left."""
    floor = full_floor(config, context)
    if floor is None or context.gpu is None:
        return
    least, explanation = floor
    if not HARDLY * context.gpu.memory_gib < least <= context.gpu.memory_gib:
        return
    remaining = context.gpu.memory_gib - least
    yield RuleHit(
        f"weights and what learns them take {least:.1f} of {context.gpu.memory_gib:.1f} GiB; "
        f"{remaining:.1f} are left",
        f"{explanation}; activations, buffers and the CUDA context have to fit the rest",
        f"offload the weights too (ZeRO-3), or train an adapter; {FIT}",
        ("zero_stage", "method", "model"),
    )


@rule("host-memory-short", "warning", "DeepSpeed estimate_zero2/3_model_states_mem_needs")
def host_memory_is_short(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """An offload that the host cannot hold."""
    if not config.offload_optimizer or config.ram_gib is None or context.parameters is None:
        return
    if config.method not in (None, "full"):
        return
    least = HOST_OFFLOAD * context.parameters / GIB
    if config.offload_weights:
        least += 2 * context.parameters / GIB
    padded = least * HOST_OFFLOAD_PADDED
    if padded <= config.ram_gib:
        return
    yield RuleHit(
        f"the offloaded optimizer takes {least:.0f} GiB of host memory, {padded:.0f} by DeepSpeed's own "
        f"estimate; there are {config.ram_gib:g}",
        "the machine swaps or the kernel ends the run, most often while the first optimizer step is made",
        "train an adapter, offload to NVMe, or take a smaller model",
        ("offload_optimizer", "ram_gib"),
    )


@rule("recomputing-is-off", "error")
def recomputing_is_off(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Gradient checkpointing off where it is needed."""
    if context.gpu is None or context.peaks is None or config.recompute:
        return
    room, peaks = context.gpu.memory_gib, context.peaks
    if peaks.recomputed <= room < peaks.as_set:
        yield RuleHit(
            f"{_micro(config, context)} take about {peaks.as_set:.1f} GiB without gradient checkpointing; "
            f"{a(context.gpu.name)} has {room:.1f}",
            f"with it {peaks.recomputed:.1f} GiB; without it the activations of all layers stay until their "
            "backward pass",
            "set `gradient_checkpointing: true`",
            ("recompute", "max_length", "micro_batch"),
        )


@rule("peak-does-not-fit", "error")
def peak_does_not_fit(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A step larger than the GPU."""
    if context.gpu is None or context.peaks is None or context.peaks.recomputed <= context.gpu.memory_gib:
        return
    yield RuleHit(
        f"{_micro(config, context)} take about {context.peaks.recomputed:.1f} GiB even with gradient "
        f"checkpointing; {a(context.gpu.name)} has {context.gpu.memory_gib:.1f}",
        "the run ends at its first long batch",
        f"lower the micro-batch or the length; {FIT}",
        ("max_length", "micro_batch", "method"),
    )


@rule("download-larger-than-stated", "warning")
def download_is_larger(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Model files that are larger."""
    if config.stated_download_gb is None or context.parameters is None:
        return
    real = 2 * context.parameters / 1e9
    if real > config.stated_download_gb * GENEROUS:
        yield RuleHit(
            f"the files of {_billions(context)} parameters in 16 bits are {real:.1f} GB, "
            f"not {config.stated_download_gb:g}",
            "disk and download time were planned for less",
            f"keep {real * 1.2:.0f} GB free for the model's files",
            ("stated_download_gb",),
        )


@rule("serving-larger-than-stated", "warning")
def serving_is_larger(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A result too large for its machine."""
    if config.serving_gb is None or context.parameters is None:
        return
    half = 2 * context.parameters / GIB
    if half > config.serving_gb:
        yield RuleHit(
            f"the result must be served in {config.serving_gb:g} GB, but in 16 bits its weights are "
            f"{half:.1f} GiB",
            "it has to be quantized to be served, and what is measured must be the quantized model",
            _smaller(context, config.serving_gb),
            ("serving_gb",),
        )


@rule("trainable-not-as-stated", "warning")
def trainable_is_not_as_stated(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Number of adapter parameters that differs from the computed one."""
    stated, real = config.stated_trainable, context.trainable
    if stated is None or real is None or abs(stated / real - 1) <= 0.1:
        return
    yield RuleHit(
        f"the adapter has {real / 1e6:.2f}M parameters, not {stated / 1e6:.2f}M",
        "grouped-query attention has smaller key and value layers than a square one"
        if context.shape is not None and context.shape.kv_heads < context.shape.heads
        else "rank × (inputs + outputs) over all adapted layers",
        f"say {real:,}",
        ("stated_trainable", "rank"),
    )


def _micro(config: Configuration, context: LintContext) -> str:
    rows = config.micro_batch or 1
    tokens = context.peaks.tokens if context.peaks else config.max_length
    return f"{rows} row{'s' * (rows != 1)} of {tokens:,} tokens"


def _smaller(context: LintContext, room: float) -> str:
    """A format that fits the weights into `room` GiB."""
    parameters = context.parameters or 0
    for form, width in (("16 bits", 2.0), ("eight bits", 1.0), ("four bits", NF4_WITH_TABLES)):
        gib = parameters * width / GIB
        if gib < room:
            return f"in {form} they are about {gib:.1f} GiB"
    return "take a smaller model"


NF4_WITH_TABLES = 0.6
"""Bytes per weight if embeddings and head stay in 16 bits, for a model of some billions."""


def _billions(context: LintContext) -> str:
    return f"{(context.parameters or 0) / 1e9:.2f}B"


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
            "keep bf16 where the GPU has it, else fp16",
            ("both_halves",),
        )


@rule("bf16-missing", "error")
def bf16_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Bfloat16 on a GPU without it."""
    gpu = context.gpu
    if gpu is None or gpu.has_bf16 or "bfloat16" not in (config.precision, config.compute_dtype):
        return
    field = "precision" if config.precision == "bfloat16" else "compute_dtype"
    yield RuleHit(
        f"bfloat16 on {a(gpu.name)}, which does not have it (compute capability {gpu.capability:g})",
        "it is refused, or emulated in software many times slower",
        "use fp16 with loss scaling, or a GPU of compute capability 8.0 or later",
        (field, "gpu"),
    )


@rule("flash-attention-missing", "error", "flash-attn README: Ampere, Ada or Hopper")
def flash_attention_is_missing(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Flash Attention 2 before Ampere."""
    if config.flash_attention and context.gpu is not None and context.gpu.capability < AMPERE:
        yield RuleHit(
            f"Flash Attention 2 on {a(context.gpu.name)} (compute capability {context.gpu.capability:g})",
            "its kernels need 8.0 or later; loading the model fails",
            'use `attn_implementation: "sdpa"`, which takes the best kernel that the GPU has',
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
    """Fp16 on a GPU that has bfloat16."""
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


@rule("gpu-unsupported", "warning", WHEELS)
def gpu_is_unsupported(_said: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """A GPU that current torch has no kernels for."""
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
def gpu_has_no_tensor_cores(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Half precision that is no faster."""
    gpu = context.gpu
    if gpu is not None and gpu.capability < VOLTA and config.precision in ("float16", "bfloat16"):
        yield RuleHit(
            f"{a(gpu.name)} has no tensor cores: {gpu.half_tflops:g} TFLOPS in half precision",
            "half precision saves memory there, but hardly any time",
            f"expect {gpu.half_tflops:g} TFLOPS at best, not those of a newer GPU of 16 GB",
            ("precision", "gpu"),
        )


@rule("8bit-optimizer-on-cpu", "error")
def eight_bit_optimizer_on_cpu(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """An optimizer that needs a GPU."""
    if context.on_cpu and config.optimizer and ("8bit" in config.optimizer or "paged" in config.optimizer):
        yield RuleHit(
            f"the optimizer {config.optimizer} on a CPU",
            "the 8-bit and paged optimizers of bitsandbytes need a GPU",
            "use `adamw_torch`; an adapter's optimizer is small",
            ("optimizer",),
        )


@rule("fp16-on-cpu", "warning")
def fp16_on_cpu(config: Configuration, context: LintContext) -> Iterator[RuleHit]:
    """Fp16 where it is slowest."""
    if context.on_cpu and config.precision == "float16":
        yield RuleHit(
            "fp16 on a CPU",
            "CPUs multiply fp16 slowly or not at all, and training in it needs loss scaling",
            "use bf16 where the CPU has AVX-512 BF16 or AMX, else float32",
            ("precision",),
        )
