"""A run that is killed with -9 at random moments and goes on at another place each time keeps its bytes.

Runs `tests/contract/test_resume_places.py` with the tiny model: `local`, `ssh` on loopback, `slurm` (as root)
and `ray`, where they are installed. The order of the places and the steps are random.

    PYTHONPATH=$PWD/.ray python benchmarks/resume_places.py [--kills 20]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import save_results

ROOT = Path(__file__).parents[1]
TEST = "tests/contract/test_resume_places.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="graft-resume-") as folder:
        report = Path(folder) / "report.json"
        chosen = {
            "GRAFT_RESUME_KILLS": str(given.kills),
            "GRAFT_RESUME_SEED": str(given.seed),
            "GRAFT_RESUME_REPORT": str(report),
        }
        began = time.monotonic()
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", "slow", TEST]
        code = subprocess.run(words, cwd=ROOT, env={**os.environ, **chosen}, check=False).returncode
        if code or not report.exists():
            sys.exit(f"the test ended with {code}")
        found = json.loads(report.read_text())
    seconds = round(time.monotonic() - began)
    path = save_results("resume_places", {**found, "seed": given.seed, "seconds": seconds})
    print(f"{found['kills']} kills, places {', '.join(found['places'])}: the same bytes; {path}")


if __name__ == "__main__":
    main()
