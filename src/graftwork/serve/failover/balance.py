"""Chooses the replica of a request by load and weight; a budget limits retries."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


class LoadedReplica(Protocol):
    """What the choice depends on."""

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


def choose_replica(candidates: Sequence[R]) -> R:
    """The least loaded of the candidates, of which there must be at least one."""
    return candidates[0] if len(candidates) == 1 else min(candidates, key=_load)


def _load(replica: LoadedReplica) -> tuple[float, float]:
    return replica.outstanding / replica.weight, replica.assigned / replica.weight


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
