"""Writes requirements.lock: versions and hashes of what `graftwork[all]` needs, on every platform.

    python tools/lock_packages.py

In: pyproject.toml, constraints.txt, the index that uv is set up for. Out: requirements.lock, without torch.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# Versions and hashes of what `graftwork[all]` needs, on every platform; made by `make lock`.
# torch is not among them: its build depends on the machine (CPU, CUDA, ROCm), and so does its hash.
#   pip install torch==2.13.0
#   pip install --require-hashes --no-deps -r requirements.lock; pip install --no-deps .
"""
WITHOUT_TORCH = 'torch==2.13.0; python_version < "3"\n'
"""An override that holds nowhere: neither torch nor what it brings is resolved."""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        override, made = Path(scratch) / "override.txt", Path(scratch) / "lock.txt"
        override.write_text(WITHOUT_TORCH)
        options = ["--extra", "all", "-c", "constraints.txt", "--override", str(override), "-o", str(made)]
        options += ["--generate-hashes", "--universal", "--python-version", "3.11"]
        options += ["--no-header", "--no-annotate", "--quiet"]
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", *options]
        subprocess.run(command, cwd=ROOT, check=True)
        (ROOT / "requirements.lock").write_text(HEAD + made.read_text())


if __name__ == "__main__":
    main()
