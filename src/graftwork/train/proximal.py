"""The proximal term of FedProx: what is trained is pulled towards its values before the first step.

In: parameters with the gradient of the loss. Out: the same gradients with `strength · (now - start)` added.
The start is taken when the term is made, before a checkpoint is restored: a resumed run has the same one.
"""

from collections.abc import Sequence

import torch
from torch import nn

PROXIMAL_MEASURE = "proximal"
"""The name of the term in a step's measures."""


class ProximalTerm:
    def __init__(self, parameters: Sequence[nn.Parameter], strength: float) -> None:
        self._parameters, self._strength = list(parameters), strength
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def add_gradients(self) -> float:
        """Add the term to the gradients that are there; returns its value."""
        total = 0.0
        for parameter, start in zip(self._parameters, self._start, strict=True):
            if parameter.grad is None:
                continue
            distance = parameter - start
            parameter.grad.add_(distance.to(parameter.grad.dtype), alpha=self._strength)
            total += float((distance.double() ** 2).sum())
        return self._strength / 2 * total
