"""A frozen linear layer with low-rank adapters, and for DoRA with magnitudes.

In: the layer, of any kind that multiplies by a weight. Out: the same layer, of which one adapter or
none acts. Adapters are kept in float32 and work in the type of what flows through. Knows no files.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.nf4 import Nf4Linear, dequantize
from graftwork.model.parts import is_transposed, layer_sizes

RowChange = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What adapters make of the output of a layer, from its input, its output and its bias."""


class LoraLinear(nn.Module):
    """y = W x + scale · B (A x); with magnitudes m, each output is scaled by m / |W + scale · B A|."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = layer_sizes(base)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ParameterDict()
        self.scales: dict[str, float] = {}
        self.active: str | None = None
        self.row_change: RowChange | None = None
        """Set while the rows of a batch have adapters of their own; `active` does not count then."""
        self._squares: Tensor | None = None
        self._lengths: dict[str, tuple[tuple[int, ...], Tensor]] = {}

    @property
    def device(self) -> torch.device:
        base = self.base_layer
        where: torch.device = base.device if isinstance(base, Nf4Linear) else base.weight.device
        return where

    def add(self, name: str, a: Tensor, b: Tensor, scale: float, *, magnitude: Tensor | None = None) -> None:
        self.lora_A[name] = self._own(a)
        self.lora_B[name] = self._own(b)
        if magnitude is not None:
            self.lora_magnitude_vector[name] = self._own(magnitude)
        self.scales[name] = scale

    def _own(self, tensor: Tensor) -> nn.Parameter:
        # The alignment of a tensor can change the last bit of a product, so all tensors are copied.
        return nn.Parameter(tensor.detach().to(self.device, torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.row_change is not None:
            return self.row_change(x, y, self.base_layer.bias)
        return y if self.active is None or self.active not in self.scales else self.change(x, y, self.active)

    def change(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """What an adapter makes of the layer's own output `y`."""
        low = nn.functional.linear(x, self.lora_A[name].to(x.dtype))
        change = nn.functional.linear(low, self.lora_B[name].to(x.dtype)) * self.scales[name]
        if name not in self.lora_magnitude_vector:
            return y + change
        stretch = self.stretch_of(name)
        bias: Tensor | None = self.base_layer.bias
        if bias is None:
            return stretch.to(y.dtype) * (y + change)
        return stretch.to(y.dtype) * (y - bias + change) + bias

    def stretch_of(self, name: str) -> Tensor:
        """What DoRA multiplies each output with: m / |W + scale · B A| a row.

        By the rule of DoRA no gradient flows through the length. It is multiplied out, so that no second
        matrix of the size of W is built. Who only reads, reads it again and again: then it is kept as long as
        A and B stay what they are.
        """
        magnitude: Tensor = self.lora_magnitude_vector[name]
        a, b = self.lora_A[name], self.lora_B[name]
        state = (a._version, b._version, a.data_ptr(), b.data_ptr())
        if not torch.is_grad_enabled() and name in self._lengths and self._lengths[name][0] == state:
            return magnitude / self._lengths[name][1]
        with torch.no_grad():
            scale, squares = self.scales[name], self.base_lengths().square()
            crossed = (weight_matrix(self.base_layer).float() @ a.T * b).sum(dim=1)
            own = (b @ (a @ a.T) * b).sum(dim=1)
            length: Tensor = (squares + 2 * scale * crossed + scale * scale * own).clamp(min=0).sqrt()
        if not torch.is_grad_enabled():
            self._lengths[name] = (state, length)
        return magnitude / length

    @torch.no_grad()
    def base_lengths(self) -> Tensor:
        """The length of each row of W: a fresh adapter's magnitudes."""
        if self._squares is None:
            self._squares = weight_matrix(self.base_layer).float().square().sum(dim=1)
        return self._squares.sqrt()


def weight_matrix(layer: Any) -> Tensor:
    """The layer's weight as [out, in], whatever it is kept as."""
    if isinstance(layer, Nf4Linear):
        return dequantize(layer.quantised, torch.float32)
    weight: Tensor = layer.weight.detach()
    return weight.T if is_transposed(layer) else weight
