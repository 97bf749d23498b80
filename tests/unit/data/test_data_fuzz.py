import importlib.util
from pathlib import Path

TARGET = Path(__file__).parents[2] / "fuzz" / "fuzz_readers.py"


def test_broken_rows_and_files_raise_nothing_but_our_own_errors(tmp_path):
    spec = importlib.util.spec_from_file_location("fuzz_readers", TARGET)
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    assert sum(fuzz.fuzz_once(tmp_path, seed) for seed in range(80)) > 80
