"""How much memory this process took at most."""

import resource
import sys


def peak_memory_gib() -> float:
    """The high-water mark of resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bytes_ = peak if sys.platform == "darwin" else peak * 1024
    return float(bytes_ / 2**30)
