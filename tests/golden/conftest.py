import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

# The gateway over an engine in one event loop, which tests of serving share.
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "serve"))


@pytest.fixture(scope="session")
def update_golden(request) -> bool:
    """Whether to store what a test sees as what is expected from now on."""
    return request.config.getoption("--update-golden")


@pytest.fixture(scope="session", autouse=True)
def search_by_work():
    """A week is searched for as long as on a quiet machine, however busy this one is."""
    from ortools.sat.python import cp_model

    class BusySolver(cp_model.CpSolver):
        def solve(self, model, *callbacks):
            self.parameters.max_deterministic_time = self.parameters.max_time_in_seconds
            self.parameters.max_time_in_seconds = 600
            return super().solve(model, *callbacks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cp_model, "CpSolver", BusySolver)
        patch.setattr("graftwork.week.plan.time", SimpleNamespace(monotonic=time.process_time))
        yield
