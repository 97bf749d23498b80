"""Small bundles for tests: the trial worker, which needs no model."""

import os
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

from graftwork.fleet.bundle import BundleParts, build_bundle
from graftwork.records.fleet import BundleBase

NO_BASE = BundleBase(kind="none", name="", revision="")


def trial_parts(**changes):
    job = {"steps": 3, "step_seconds": 0.0, **changes.pop("job", {})}
    values = {"run_id": "run1", "module": "graftwork.fleet.trial_worker", "base": NO_BASE, **changes}
    return BundleParts(job=job, **values)


def trial_bundle(root, **changes):
    return build_bundle(trial_parts(**changes), root / "bundles")


def with_vanishing_folder(folder, monkeypatch):
    """A folder in it goes at the moment at which somebody who has listed it looks into it."""
    part = folder / "checkpoints" / ".step-000002.part"
    part.mkdir(parents=True)
    scan = os.scandir

    def scandir(path="."):
        if Path(path) == part and part.exists():
            part.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return part


LARGE = 2**26
"""Bytes of a file that stands for weights."""


@contextmanager
def memory_limit(size):
    """What Python allocates within must stay below so many bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak / 1e6:.0f} MB were allocated at once"
