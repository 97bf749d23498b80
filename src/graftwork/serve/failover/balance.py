"""Chooses the replica of a request: by load and weight, or by its prompt as long as that is fair.

A prompt's replica is found by rendezvous hashing, so that it stays the same while other replicas come and go.
It is left when it has more than its fair share of the running requests. A budget limits retries.
"""

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

_MASK = 2**64 - 1


class LoadedReplica(Protocol):
    """What the choice depends on."""

    @property
    def seed(self) -> int: ...

    @property
    def weight(self) -> float: ...

    @property
    def outstanding(self) -> int:
        """Requests that run now."""
        ...

    @property
    def assigned(self) -> int:
        """Requests so far. Among equally loaded replicas it makes the shares follow the weights."""
        ...


R = TypeVar("R", bound=LoadedReplica)


def make_seed(name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 & _MASK


def prefix_key(model: str, messages: Sequence[dict[str, str]]) -> int | None:
    """A number that requests share if they have model and system prompt in common; None without one."""
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return None
    return zlib.crc32(messages[0]["content"].encode(errors="surrogatepass"), zlib.crc32(model.encode()))


def choose_replica(candidates: Sequence[R], *, key: int | None = None, slack: float = 1.25) -> R:
    """One of the candidates, of which there must be at least one."""
    if len(candidates) == 1:
        return candidates[0]
    if key is not None:
        preferred = prefer(candidates, key)
        total, weight = 1, 0.0
        for replica in candidates:
            total += replica.outstanding
            weight += replica.weight
        if preferred.outstanding + 1 <= math.ceil(slack * total * preferred.weight / weight):
            return preferred
    return min(candidates, key=_load)


def prefer(candidates: Sequence[R], key: int) -> R:
    """The replica of a prompt, by weighted rendezvous hashing."""
    return max(candidates, key=lambda replica: replica.weight * _score(key ^ replica.seed))


def _load(replica: LoadedReplica) -> tuple[float, float]:
    return replica.outstanding / replica.weight, replica.assigned / replica.weight


@lru_cache(maxsize=4096)
def _score(value: int) -> float:
    """Drawn so that the highest of several, each times its weight, is each with the share of its weight."""
    return -1 / math.log(_draw(value))


def _draw(value: int) -> float:
    """A number between 0 and 1, both excluded, that looks random."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    value ^= value >> 31
    return ((value >> 12) + 0.5) / 2**52


class RetryBudget:
    """Retries are at most a burst plus a share of the requests, so that they cannot multiply an outage."""

    def __init__(self, *, share: float, burst: int) -> None:
        self.share, self.burst = share, burst
        self._balance = float(burst)
        self.spent = 0
        self.refused = 0

    def deposit(self) -> None:
        """A request came."""
        if self._balance < self.burst:
            self._balance = min(self._balance + self.share, float(self.burst))

    def withdraw(self) -> bool:
        """Whether one more retry may be sent; if so, it is counted."""
        if self._balance < 1 or not self.share:
            self.refused += 1
            return False
        self._balance -= 1
        self.spent += 1
        return True

    def revise(self, *, share: float, burst: int) -> None:
        self.share, self.burst = share, burst
        self._balance = min(self._balance, float(burst))
