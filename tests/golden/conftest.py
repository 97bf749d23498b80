import sys
from pathlib import Path

import pytest

# The gateway over an engine in one event loop, which tests of serving share.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "serve"))


@pytest.fixture(scope="session")
def update_golden(request) -> bool:
    """Whether to store what a test sees as what is expected from now on."""
    return request.config.getoption("--update-golden")
