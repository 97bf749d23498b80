"""What 8-bit weights and products cost, by layers: loss, logits and gradients of SmolLM2 against float32.

The products are those of the step on a GPU (e4m3, a scale a row), computed on the CPU in float32: no bf16
rounding is in the figures. Run: `python benchmarks/eight_bits.py [--rows 4] [--json FILE]`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.peft import attach
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base
from graftwork.model.shape import read_shape
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin
from graftwork.records.plan import Tuning
from graftwork.train.gpu import lora, quantized
from graftwork.train.gpu.engine import GpuEngine
from graftwork.train.gpu.load import FrozenWeights, load_quantized
from graftwork.train.gpu.quantized import EightBitWeight, WholeWeight, quantize_eight
from graftwork.train.settings import ALL_LINEARS, TrainSettings

LOG = Path(__file__).parents[1] / "examples" / "cited_answers"
RANK = 16
Chosen = Callable[[int, str], bool]


def read_rows(folder: Path, count: int) -> list[Row]:
    """The first conversations of the example's log, their second half trained."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = [line for path in sorted(LOG.rglob("*.jsonl")) for line in path.read_text().splitlines()][:count]
    rows = []
    for at, text in enumerate(texts):
        tokens = tuple(tokenizer(text).input_ids[:160])
        rows.append(
            Row(
                id=str(at),
                origin=Origin(file="log.jsonl", line=at + 1),
                messages=(Message(role="user", content="x"),),
                reply="y",
                tokens=tokens,
                trained_from=len(tokens) // 2,
            )
        )
    return rows


class Bench:
    def __init__(self, count: int) -> None:
        folder = Path(find_base(EMBEDDED, project_folder=Path()).folder)
        self.model, self.rows = load_base(folder), read_rows(folder, count)
        layers = len(self.model.model.layers)
        self.tuning = Tuning(
            form="whole",
            head="whole",
            micro_tokens=1024,
            longest=256,
            keep=layers,
            lean=0,
            chunk_tokens=1024,
            head_tokens=256,
            turned=False,
            host_embedding=False,
            limit_gib=8.0,
            peak_gib=0.0,
            seconds_a_token=0.0,
        )
        self.frozen = load_quantized(self.model, self.tuning, device="cpu")
        shape = AdapterShape(rank=RANK, alpha=32, targets=ALL_LINEARS, layers=tuple(range(layers)))
        self.parameters = attach(self.model, shape, seed=3)
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters):
                # As after some training: B of a thousandth changes little and lets gradients reach A.
                if at % 2:
                    parameter.normal_(std=1e-3, generator=torch.Generator().manual_seed(at))
        self.layers, self.shape = layers, read_shape(folder)

    def measure(self, chosen: Chosen, *, head: bool) -> tuple[float, list[torch.Tensor]]:
        """Loss and gradients with the chosen products in 8 bits."""
        blocks = tuple(
            {name: _eight(weight) if chosen(at, name) else weight for name, weight in block.items()}
            for at, block in enumerate(self.frozen.blocks)
        )
        frozen = FrozenWeights(blocks, _eight(self.frozen.head) if head else self.frozen.head)
        settings = TrainSettings(rank=RANK, alpha=32, max_gradient_norm=1e9)
        engine = GpuEngine(
            self.model,
            self.parameters,
            settings=settings,
            frozen=frozen,
            tuning=self.tuning,
            shape=self.shape,
        )
        engine.settle(())
        for parameter in self.parameters:
            parameter.grad = None
        loss = engine.backward(self.rows).loss
        return loss, [parameter.grad.clone() for parameter in self.parameters]


@contextmanager
def exact_channels(count: int) -> Iterator[None]:
    """Products in 8 bits but for the `count` input channels with the largest values, forward and backward."""

    def forward(frozen: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(frozen, EightBitWeight):
            return quantized.product(frozen, x)
        top = x.abs().amax(dim=0).topk(count).indices
        rest = x.index_fill(1, top, 0.0)
        weight = frozen.codes[:, top].float() * frozen.scale
        return quantized.product(frozen, rest) + x[:, top] @ weight.t()

    def backward(frozen: Any, y: torch.Tensor) -> torch.Tensor:
        if not isinstance(frozen, EightBitWeight):
            return quantized.transposed_product(frozen, y)
        top = (y.abs().amax(dim=0) * frozen.scale.view(-1)).topk(count).indices
        rest = y.index_fill(1, top, 0.0)
        weight = frozen.codes[top].float() * frozen.scale[top]
        return quantized.transposed_product(frozen, rest) + y[:, top] @ weight

    before = lora.product, lora.transposed_product
    lora.product, lora.transposed_product = forward, backward
    try:
        yield
    finally:
        lora.product, lora.transposed_product = before


def _eight(weight: Any) -> Any:
    assert isinstance(weight, WholeWeight)
    return quantize_eight([weight.weight], weight.bias, turned=False, device=weight.weight.device)


def compare(own: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The length of the error over the length of the gradient, all layers together."""
    error = sum(float((a - b).square().sum()) for a, b in zip(own, exact, strict=True))
    return (error / sum(float(b.square().sum()) for b in exact)) ** 0.5


def by_layer(own: list[torch.Tensor], exact: list[torch.Tensor], layers: int) -> list[float]:
    each = len(exact) // layers
    return [
        round(compare(own[at : at + each], exact[at : at + each]), 4) for at in range(0, len(exact), each)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--channels-only", action="store_true", help="Only the exact channels.")
    asked = parser.parse_args()
    bench = Bench(asked.rows)
    n = bench.layers
    cases: dict[str, tuple[Chosen, bool]] = {
        "all": (lambda _at, _name: True, True),
        "all but the head": (lambda _at, _name: True, False),
        "head alone": (lambda _at, _name: False, True),
        "qkv alone": (lambda _at, name: name == "qkv", False),
        "out alone": (lambda _at, name: name == "out", False),
        "gate and up alone": (lambda _at, name: name == "gate_up", False),
        "down alone": (lambda _at, name: name == "down", False),
        "first tenth of the blocks in 16 bits": (lambda at, _name: at >= n // 10, False),
        "last tenth of the blocks in 16 bits": (lambda at, _name: at < n - n // 10, False),
        "last fifth of the blocks in 16 bits": (lambda at, _name: at < n - n // 5, False),
        "down in 16 bits": (lambda _at, name: name != "down", False),
    }
    exact, gradients = bench.measure(lambda _at, _name: False, head=False)
    found: dict[str, Any] = {"loss": exact, "tokens": sum(len(row.tokens) for row in bench.rows)}
    for name, (chosen, head) in () if asked.channels_only else cases.items():
        loss, own = bench.measure(chosen, head=head)
        found[name] = {
            "loss_change": loss / exact - 1,
            "gradient_error": compare(own, gradients),
            "gradient_error_by_layer": by_layer(own, gradients, n),
        }
        print(f"{name:40} loss {loss / exact - 1:+.3%}  gradient {found[name]['gradient_error']:.3f}")
        sys.stdout.flush()
    for count in (8, 32):
        with exact_channels(count):
            loss, own = bench.measure(lambda _at, _name: True, head=False)
        name = f"{count} channels of each product exact"
        found[name] = {"loss_change": loss / exact - 1, "gradient_error": compare(own, gradients)}
        print(f"{name:40} loss {loss / exact - 1:+.3%}  gradient {found[name]['gradient_error']:.3f}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
