"""A port for a server that a test starts under a number that it must know before.

In: nothing. Out: a number that nobody listens on. It lies outside the range from which the system gives ports
to connections and to servers that ask for any, so that nobody else is given it before the server is up.
"""

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, WORKERS = 10_000, 16
REFUSED_BY_BROWSERS = {10_080}
_used: set[int] = set(REFUSED_BY_BROWSERS)


def free_port() -> int:
    """Never the same one twice, nor for two workers of one test run."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    ports = [port for port in range(FIRST, _first_given()) if port % WORKERS == worker and port not in _used]
    random.Random().shuffle(ports)
    port = next((port for port in ports if _is_free(port)), 0) or _any_port()
    _used.add(port)
    return port


def _first_given() -> int:
    try:
        return int(RANGE.read_text().split()[0])
    except OSError:
        return 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
