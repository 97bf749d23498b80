"""A budget of retries: never more than a burst plus a share of the requests, so that retries cannot multiply
an outage."""


class RetryBudget:
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
