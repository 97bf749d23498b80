"""Rates of a GPU within a training step, by its data sheet. Pure.

Input: a GPU of the catalog. Output: StepRates, in operations and bytes per second. Constants without a source
were fitted to benchmarks/results/train_gpu.json and tests/data/step_times.jsonl (H200, 2026-11).
`probed_rates.py` replaces shares by what was measured.
"""

from graftwork.records.base import Record
from graftwork.records.hardware import Gpu
from graftwork.records.plan import Level

POWER_FREE_SHARE, LOST_PER_TFLOP_PER_WATT = 0.95, 0.215
"""Share of the stated peak that a step's products reach, and what a GPU with too few watts for its peak
loses. Measured: 640 of 989 on an H200 (1.41 TFLOPS per watt; benchmarks/results/train_gpu.json, 2026-11).
Published: an RTX 5060 Ti reaches 81 % of its peak over a whole step (0.26 TFLOPS per watt; IST-DASLab/llmq).
A line through both; derived for all others.
"""
LEAST_SHARE, MOST_SHARE = 0.40, 0.89

EIGHT_SHARE = 0.90
"""8-bit products reach less of their peak than 16-bit ones: 1150 of 1979 against 640 of 989 (H200)."""
BANDWIDTH_SHARE, GDDR_SHARE = 0.73, 0.88
"""3.5 of 4.8 TB/s within a step on an H200; the slower memory of GPUs without HBM is better utilized, and
their large caches hold some of the data: derived.
"""
WITH_HBM = (6.0, 7.0, 8.0, 9.0, 10.0)
"""Compute capabilities of GPUs with stacked memory."""
ATTENTION_SHARE = 0.66
"""Rate of attention, as a share of the rate of products: 420 of 640 on an H200."""
MEASURED_ATTENTION, MEASURED_LENGTH = 420e12, 2048
"""Where that was measured; how it grows with the length is published (FlashAttention-3, 2024: causal, on an
H100, 0.5, 0.75, 1, 1.2, 1.3 of it at 512, 1k, 2k, 4k and 8k). Slower GPUs are full sooner: derived."""
HALF_FULL_LENGTH = 920
NARROW_HEADS = 0.85
"""Heads of 64 over heads of 128; the same source has 0.75 for its own kernels."""
UNEVEN_SHARE = 0.48
"""Rows of different lengths use another kernel than rows of one length (H200)."""
OLD_ATTENTION_SHARE = 0.30
"""Before Ampere there is no flash attention 2: derived."""
HOST_SHARE = 0.65
"""Share of the link's stated rate: 20 of 31.5 GB/s (PCIe 4.0 x16) staged through the host, published."""
OPENED_NF4_BYTES, PLAIN_DEQUANTIZING = 2.5, 0.22
"""Half a byte read, two written; and the share of the bandwidth that bitsandbytes reaches."""
TURNING, DEQUANTIZING = 0.65, 1.0
"""Share of the bandwidth that transposing 8-bit weights and dequantizing NF4 reach within a step (H200)."""
FIXED_SECONDS, FIXED_PER_LAYER = 0.0006, 0.00003
"""Start and end of a pass on the host; and what each adapted block's small tensors add to the clipping and
the update, which are recorded.
"""
KERNEL_SECONDS = 2.2e-6
"""Minimum time of a kernel on the GPU, with the gap to the next one of a recording."""
MEASURED_HALF = 640e12
FULL_OUTPUTS = 1.3e6
"""Outputs of a product at which an H200 reaches half of its rate: its multiprocessors share tiles of them."""
LAUNCH_SECONDS = 8e-6
"""One small kernel called from Python: 7 to 9 µs on the host of an H200 (2026-11). The host decides."""
OLD_SHARE = 0.75
"""GPUs before Ampere reach less with current libraries: derived."""
SUSTAINED_TFLOPS = {"T4": 24.0}
"""Half-precision rate that a power cap leaves under sustained load, if published. T4: 24 of 65 at 4096³ with
cuBLAS; at 70 W that is to be expected of continuous products (forums.developer.nvidia.com/t/264462, 2023).
The smaller products of a step reach less: `OLD_SHARE` of it.
"""
FIRST_WITH_TENSOR_CORES = 7.0
CONSUMER = ("RTX 3", "RTX 4", "RTX 5")
"""GPUs whose products with float32 accumulation run at half rate."""


class StepRates(Record):
    """Rates reached in practice, in operations and bytes per second; and the peaks that no estimate may
    exceed.
    """

    name: str
    half: float
    """16-bit products in a whole step."""
    eight: float | None = None
    """8-bit products; None if the GPU has none."""
    single: float
    """32-bit products."""
    bandwidth: float
    attention: float
    host: float
    """Bytes to and from host memory."""
    fixed_seconds: float = FIXED_SECONDS
    fixed_per_layer: float = FIXED_PER_LAYER
    launch_seconds: float = LAUNCH_SECONDS
    kernel_seconds: float = KERNEL_SECONDS
    turning: float = TURNING
    dequantising: float = DEQUANTIZING
    has_bf16: bool = True
    peak_half: float
    peak_eight: float | None = None
    peak_bandwidth: float
    layer_factor: float = 1.0
    """Ratio of measured to computed seconds of a layer, if a real step was timed."""
    form_factors: dict[str, float] = {}
    """The same for each form of the weights that was timed."""
    head_factor: float = 1.0
    """The same for the head and the loss."""
    plain_factor: float = 1.0
    """The same for GPU time in a step of transformers + PEFT."""
    host_factor: float = 1.0
    """The same for its host time."""
    certainty: Level = "computed"

    def product_seconds(
        self, tokens: float, inputs: int, outputs: int, rate: float, *, width: float = 2.0
    ) -> float:
        """Return the time of one product with a weight of `width` bytes per number. Few outputs do not fill a
        GPU; with few tokens it is bound by reading the weight.
        """
        results = tokens * outputs
        full = FULL_OUTPUTS * rate / MEASURED_HALF
        computing = 2.0 * results * inputs / rate * (1 + full / results)
        return max(computing, width * inputs * outputs / self.bandwidth, self.kernel_seconds)

    def products(self, dtype: str) -> float:
        """Rate of products in this type. Without bfloat16 in hardware it is that of 32 bits."""
        if dtype == "float32" or (dtype == "bfloat16" and not self.has_bf16):
            return self.single
        return self.half

    def attention_at(self, length: float, head_dim: int) -> float:
        """Attention's rate over rows of this length: short rows and narrow heads do not fill a GPU."""
        half_full = HALF_FULL_LENGTH * min(1.0, self.attention / MEASURED_ATTENTION)
        full = self.attention * (1 + half_full / MEASURED_LENGTH)
        return full * length / (length + half_full) * (NARROW_HEADS if head_dim < 96 else 1.0)

    def factor_of(self, form: str) -> float:
        """Ratio of measured to computed time of blocks with weights in this form."""
        return self.form_factors.get(form, self.layer_factor)

    @property
    def best_eight(self) -> float:
        return self.eight if self.eight is not None else self.half


def rates_of(gpu: Gpu) -> StepRates:
    """Return the expected rates of this GPU without a probe."""
    share = POWER_FREE_SHARE - LOST_PER_TFLOP_PER_WATT * gpu.half_tflops / gpu.watts
    share = min(max(share, LEAST_SHARE), MOST_SHARE) * (OLD_SHARE if gpu.capability < 8.0 else 1.0)
    if gpu.name in SUSTAINED_TFLOPS:
        share = SUSTAINED_TFLOPS[gpu.name] / gpu.half_tflops * OLD_SHARE
    old, stacked = gpu.capability < 8.0, gpu.capability in WITH_HBM
    half = gpu.half_tflops * 1e12 * share
    peak_eight = gpu.eight_tflops * 1e12 if gpu.has_fp8 and gpu.eight_tflops else None
    return StepRates(
        name=gpu.name,
        half=half,
        eight=peak_eight * share * EIGHT_SHARE if peak_eight is not None else None,
        single=min(gpu.half_tflops * 1e12 * single_share(gpu.name, gpu.capability) * MOST_SHARE, half),
        bandwidth=gpu.bandwidth_gb_s * 1e9 * (BANDWIDTH_SHARE if stacked else GDDR_SHARE),
        attention=half * (OLD_ATTENTION_SHARE if old else ATTENTION_SHARE),
        host=gpu.pcie_gb_s * 1e9 * HOST_SHARE,
        has_bf16=gpu.has_bf16,
        peak_half=gpu.half_tflops * 1e12,
        peak_eight=peak_eight,
        peak_bandwidth=gpu.bandwidth_gb_s * 1e9,
    )


def single_share(name: str, capability: float) -> float:
    """32-bit products over 16-bit ones, by generation: the catalog states only the latter. Derived from
    the makers' tables (H100 67 of 989, A100 19.5 of 312, V100 15.7 of 125, RTX 4090 82.6 of 165)."""
    if capability < FIRST_WITH_TENSOR_CORES:
        return 1 / 2
    if capability < 8.0:
        return 1 / 8
    if capability in (8.0, 9.0, 10.0):
        return 1 / 16
    name = name.upper().removeprefix("NVIDIA ").removeprefix("GEFORCE ")
    return 1 / 2 if name.startswith(CONSUMER) and " ADA" not in name else 1 / 4
