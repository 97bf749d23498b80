"""How long `graft --help` takes, beside a bare interpreter and beside importing what it leaves out.

Run: python benchmarks/startup.py. The promise is half a second; times on shared machines vary, so look
at the ratio to the bare interpreter too.
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 9
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "graft --help": [sys.executable, "-m", "graftwork.cli.main", "--help"],
    "import transformers, torch": [sys.executable, "-c", "import torch, transformers"],
}


def seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            found[name].append(seconds(command))
    medians = {name: statistics.median(times) for name, times in found.items()}
    bare = medians["python -c pass"]
    for name, median in medians.items():
        print(f"{name:<28} {median:6.3f} s   {median / bare:5.1f} × the bare interpreter")
    print(f"promise of 0.5 s: {'kept' if medians['graft --help'] < 0.5 else 'BROKEN'}")


if __name__ == "__main__":
    main()
