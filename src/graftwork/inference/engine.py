"""What every inference engine offers."""

from typing import NamedTuple


class Timing(NamedTuple):
    """One request alone: seconds to the first token, where that is known, and to the last."""

    first_token: float | None
    total: float
