"""How the hostile tests find what they share with the unit tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "serve"))


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A real file system of two MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "graft-test", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a small disk be mounted")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
