"""What is imported for workers before they are forked leaves a process that can be forked."""

import json
import os
import subprocess
import sys

import pytest

from graftwork.pipeline.table import WORKER_MODULES

SCRIPT = """
import json, os, sys
from graftwork.process.preload import MODULES, import_without_unused
import_without_unused((*MODULES, *sys.argv[1:]))
missing = [name for name in sys.argv[1:] if name not in sys.modules]
print(json.dumps([len(os.listdir("/proc/self/task")), missing]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_modules_for_workers_are_all_imported_and_start_no_thread():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *WORKER_MODULES],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [1, []]
