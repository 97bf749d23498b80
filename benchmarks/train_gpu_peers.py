"""The peers' LoRA and QLoRA step on one GPU: tokens per second and memory, one process a setting.

Random weights of the Qwen2.5-7B shape, rows of 2,048 tokens, r = 16 and alpha = 32 on all seven linears,
bf16 autocast, fused AdamW at every micro-batch; 4 steps to warm up, the median of 8. Memory is the peak
that the allocator held (reserved) and gave out (allocated) during the steps. One JSON line a setting, then
the fastest under each cap of reserved memory; all of it also in benchmarks/results/train_gpu_peers.json.

    python benchmarks/train_gpu_peers.py [--only NAME ...] [--out peers.jsonl] [--budget-seconds 500]
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers import PREFIX, VARIANTS
from results import save_results
from train_gpu_model import SHAPES, default_folder

CAPS_GIB = (9, 16, 24, 48, 139)
SECONDS_EACH = 120.0
Result = dict[str, Any]


def best_under(cap_gib: float, results: Iterable[Result]) -> Result | None:
    """The fastest setting whose reserved memory stayed within the cap."""
    fitting = [r for r in results if "error" not in r and r["peak_reserved_gib"] <= cap_gib]
    return max(fitting, key=lambda r: r["tokens_per_second"], default=None)


def worth_another_try(results: Sequence[Result]) -> list[tuple[str, float]]:
    """Settings that would win under a cap, had the allocator not held more than it gave out.

    They get a second run on a card of that size. Otherwise a peer would lose by our way of counting.
    """
    tries = []
    for cap in CAPS_GIB:
        best = best_under(cap, results)
        for r in results:
            if "error" in r or not r["peak_allocated_gib"] < cap < r["peak_reserved_gib"]:
                continue
            if best is None or r["tokens_per_second"] > best["tokens_per_second"]:
                tries.append((r["name"], float(cap)))
    return tries


class Child:
    """One setting in its own process. States come over its output; the rest of it is kept for errors."""

    def __init__(self, name: str, folder: Path, shape: str, scratch: Path, cap_gib: float = 0.0) -> None:
        self.name, self.cap_gib = name, cap_gib
        self.tail: deque[str] = deque(maxlen=60)
        self.states: queue.Queue[Result] = queue.Queue()
        own = Path(tempfile.mkdtemp(dir=scratch))  # Unsloth writes modules where it runs
        command = [sys.executable, "-u", "peers.py", name, str(folder), shape, str(cap_gib)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=own,
            env=child_environment(own),
            process_group=0,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(PREFIX):
                self.states.put(json.loads(line.removeprefix(PREFIX)))
            else:
                self.tail.append(line.rstrip())
        self.states.put({"state": "gone"})

    def await_state(self, wanted: str, until: float) -> Result:
        """The state, or why there is none. A child that is gone stays gone for whoever asks next."""
        try:
            state = self.states.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            return {"error": f"not {wanted} within the time limit", "tail": list(self.tail)[-8:]}
        if state["state"] == wanted:
            return state
        self.states.put(state)
        return {"error": f"gone before it was {wanted}", "tail": list(self.tail)[-15:]}

    def go_on(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, which the next state says
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """It and what it started, compilers for the most part."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def child_environment(folder: Path) -> dict[str, str]:
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(
            str(Path(p).resolve()) for path in paths for p in path.split(os.pathsep)
        ),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth_compiled_cache"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
    }


def measure(child: Child, following: Child | None) -> Result:
    """Load while the one that follows is imported; time the steps when nothing else runs."""
    begun = time.monotonic()
    until = begun + SECONDS_EACH
    state = child.await_state("ready", until)
    if "error" not in state:
        child.go_on()
        state = child.await_state("loaded", until)
    if "error" not in state:
        if following is not None:
            _wait_until_imported(following, until)
        child.go_on()
        state = child.await_state("done", until + SECONDS_EACH / 2)
    child.end()
    state.pop("state", None)
    capped = {"cap_gib": child.cap_gib} if child.cap_gib else {}
    return {"name": child.name, **capped, **state, "wall_seconds": round(time.monotonic() - begun, 1)}


def _wait_until_imported(following: Child, until: float) -> None:
    """Look for the word `ready` and leave it in its place."""
    state = following.await_state("ready", until)
    if "error" not in state:
        following.states.put(state)


def run_all(
    tasks: Sequence[tuple[str, float]], folder: Path, shape: str, until: float, out: Path | None
) -> list[Result]:
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        following: Child | None = None
        try:
            for number, (task, cap) in enumerate(tasks):
                child = following or Child(task, folder, shape, Path(name), cap)
                following = None
                more = number + 1 < len(tasks) and time.monotonic() < until
                if more:
                    after, its_cap = tasks[number + 1]
                    following = Child(after, folder, shape, Path(name), its_cap)
                results.append(measure(child, following))
                publish(results[-1], out)
                if not more:
                    break
        finally:
            if following is not None:
                following.end()
    return results


def choose(asked: Sequence[str]) -> list[str]:
    """Each word is a name, or else the beginning of names; `unsloth-lora-none-mb1` is not `…-mb16`."""
    wanted = [[word] if word in VARIANTS else [n for n in VARIANTS if n.startswith(word)] for word in asked]
    return list(dict.fromkeys(name for names in wanted for name in names))


def publish(result: Result, out: Path | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these settings, or those that begin so")
    parser.add_argument("--budget-seconds", type=float, default=3600, help="start nothing new after that")
    parser.add_argument("--out", type=Path, help="append each line to this file too")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--folder", type=Path, help="the model's folder, made when it is not there")
    parser.add_argument("--list", action="store_true", help="name the settings and stop")
    asked = parser.parse_args()
    names = choose(asked.only or [""])
    if asked.list:
        print("\n".join(names))
        return
    import torch

    if not torch.cuda.is_available() and asked.shape != "tiny":
        print("passed over: the peers are measured on an NVIDIA GPU, and there is none here")
        return
    until = time.monotonic() + asked.budget_seconds
    folder = asked.folder or default_folder(asked.shape)
    make = [sys.executable, str(Path(__file__).with_name("train_gpu_model.py"))]
    subprocess.run([*make, "--shape", asked.shape, "--folder", str(folder)], check=True)
    results = run_all([(name, 0.0) for name in names], folder, asked.shape, until, asked.out)
    if tries := worth_another_try(results):
        results += run_all(tries, folder, asked.shape, until, asked.out)
    caps = [{"cap_gib": cap, **_figures(best_under(cap, results))} for cap in CAPS_GIB]
    for line in caps:
        print(json.dumps(line), flush=True)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        save_results("train_gpu_peers", {"settings": results, "best_under": caps}, device=device)


def _figures(best: Result | None) -> Result:
    wanted = ("name", "tokens_per_second", "peak_reserved_gib", "peak_allocated_gib")
    return {name: best[name] for name in wanted} if best else {}


if __name__ == "__main__":
    main()
