import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "fuzz"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    return fuzz


@pytest.mark.parametrize("seeds", [6, pytest.param(80, marks=pytest.mark.slow)])
def test_broken_rows_and_files_raise_nothing_but_our_own_errors(tmp_path, seeds):
    fuzz = load("fuzz_readers")
    assert sum(fuzz.fuzz_once(tmp_path, seed) for seed in range(seeds)) > seeds


@pytest.mark.parametrize("seeds", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_broken_traces_and_transcripts_raise_nothing_but_our_own_errors(tmp_path, monkeypatch, seeds):
    monkeypatch.setitem(sys.modules, "fuzz_readers", load("fuzz_readers"))
    fuzz = load("fuzz_traces")
    for seed in range(seeds):
        fuzz.fuzz_once(tmp_path, seed, [*fuzz.ROWS, *fuzz.FILES, "intake"])
