"""Small bundles for tests: the trial worker, which needs no model and travels in the wheel."""

import os
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from graftwork.fleet.bundle import BundleParts, build_bundle, build_wheel
from graftwork.records.fleet import BundleBase

NO_BASE = BundleBase(kind="none", name="", revision="")
TRIAL_WORKER = Path(__file__).with_name("trial_worker.py")


def trial_parts(**changes):
    job = {"steps": 3, "step_seconds": 0.0, **changes.pop("job", {})}
    values = {"run_id": "run1", "module": TRIAL_WORKER.stem, "base": NO_BASE, **changes}
    return BundleParts(job=job, **values)


def trial_bundle(root, **changes):
    return bundle_with_trial_worker(trial_parts(**changes), root / "bundles")


def bundle_with_trial_worker(parts, root):
    with patch("graftwork.fleet.bundle.build_wheel", _wheel_with_trial_worker):
        return build_bundle(parts, root)


def _wheel_with_trial_worker(target):
    path = build_wheel(target)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(TRIAL_WORKER.name, (1980, 1, 1, 0, 0, 0)), TRIAL_WORKER.read_bytes())
    return path


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
