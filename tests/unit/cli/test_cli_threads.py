"""A command computes in one thread: those of numpy would wait for each other in busy loops."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from graftwork.cli.main import main
sys.argv = ["graft", "--help"]
try:
    main()
except SystemExit:
    import numpy
    numpy.linalg.eigh(numpy.eye(300))
    print("threads:", len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_products_of_a_command_start_no_threads():
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "threads: 1"
