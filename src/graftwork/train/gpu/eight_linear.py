"""A frozen linear layer in 8 bits that stands where transformers expects one.

In: some rows of a weight that several layers share. Out: a module that computes with them as numbers:
for looks and generation, which go through the model itself. Training reads the shared codes directly.
"""

import torch
from torch import Tensor, nn

from graftwork.train.gpu.frozen import EightBitWeight


class EightBitLinear(nn.Module):
    codes: Tensor
    scale: Tensor

    def __init__(self, shared: EightBitWeight, *, begin: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = shared
        self.out_features, self.in_features = rows, shared.codes.shape[1]
        self.dtype = dtype
        self.register_buffer("codes", shared.codes[begin : begin + rows])
        self.register_buffer("scale", shared.scale[begin : begin + rows])
        bias = None if shared.bias is None else shared.bias[begin : begin + rows]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The weight as numbers, made anew each time."""
        return (self.codes.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        # Codes are exact in 16 bits; their scale is put on what comes out.
        y = nn.functional.linear(x, self.codes.to(x.dtype)).float() * self.scale.view(-1)
        return y.to(x.dtype) if self.bias is None else y.to(x.dtype) + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=8"
