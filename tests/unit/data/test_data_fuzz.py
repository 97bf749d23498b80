import importlib.util
from pathlib import Path

import pytest

TARGET = Path(__file__).parents[2] / "fuzz" / "fuzz_readers.py"


@pytest.mark.parametrize("seeds", [20, pytest.param(80, marks=pytest.mark.slow)])
def test_broken_rows_and_files_raise_nothing_but_our_own_errors(tmp_path, seeds):
    spec = importlib.util.spec_from_file_location("fuzz_readers", TARGET)
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    assert sum(fuzz.fuzz_once(tmp_path, seed) for seed in range(seeds)) > seeds
