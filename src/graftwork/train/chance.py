"""The states of the random generators that a step may draw from, by name.

Python's own and numpy's are not among them: the order of the rows is drawn from the seed alone.
"""

import torch
from torch import Tensor

HOST_RANDOM = "random/torch"
DEVICE_RANDOM = "random/cuda"


def random_states() -> dict[str, Tensor]:
    states = {HOST_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[DEVICE_RANDOM] = torch.cuda.get_rng_state()
    return states


def restore_random_states(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors[HOST_RANDOM])
    if DEVICE_RANDOM in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[DEVICE_RANDOM])
