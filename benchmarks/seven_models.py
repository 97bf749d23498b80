"""`examples/seven_models` served: memory against the plan, mixed adapters against one, a killed specialist,
and the family's gate.

Run: python benchmarks/seven_models.py --folder FOLDER. FOLDER becomes a copy of the example. Each part is
kept in FOLDER/parts.json when it is done, so an interrupted run goes on where it was; training (about six
minutes on two quiet cores) resumes too. The memory is planned before anything is served, for lengths that
are given as options. Every figure is measured through the real endpoint. Memory is the peak resident set of
the engine process.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from results import save_results

from graftwork.api.project import Project, open_project
from graftwork.files.dataset import read_rows
from graftwork.pipeline.ask_endpoint import read_health
from graftwork.pipeline.evaluation_subjects import find_trained
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_transfer import import_release
from graftwork.pipeline.releases import promote_release
from graftwork.pipeline.router import model_of, user_text
from graftwork.pipeline.steps.data import PreparedData
from graftwork.serve.http_client import Client

EXAMPLE = Path(__file__).parents[1] / "examples" / "seven_models"
SPECIALIST = "interface"
JSON = (("content-type", "application/json"),)
GRAFT = (sys.executable, "-c", "from graftwork.cli.main import main; main()")
TOKENS = 24
"""Tokens of an answer: what is planned for, and what is asked for."""
BATCH = 7
"""Requests at once: what is planned for, and what is asked."""
LONGEST = [0]
"""Tokens of the longest prompt that was sent."""
STOP_SECONDS = 900
"""A busy machine takes long to end an endpoint."""
GATE = {"metric": "chrf", "max_memory_gib": 2.0}
GATE_TOKENS = 16


def release_all(project: Project) -> dict[str, str]:
    """Release the trained adapter of every model as its champion."""
    made = {}
    for name in project.settings.all_models:
        with project.with_model(name).open() as work:
            made[name] = _release(work, name)
    return made


def _release(work: OpenProject, name: str) -> str:
    outcome = find_trained(work, name)
    assert outcome is not None, f"{name} is not trained"
    found = import_release(work, Path(outcome.adapter_folder))
    promote_release(work, found.release.id, reason="the benchmark serves what it trained", force=True)
    return found.release.id


def questions(project: Project) -> list[tuple[str, str]]:
    """Held-out questions with the model that each is for."""
    with project.open() as work:
        entry = work.ledger.get("prepare")
        assert entry is not None
        prepared = PreparedData.model_validate(entry.output)
        rows = {r.id: r for folder in prepared.folders.values() for r in read_rows(Path(folder), "test")}
        return [(user_text(rows[key]), model_of(rows[key], project.settings)) for key in sorted(rows)]


class Served:
    """`graft serve` of a project in a process of its own."""

    def __init__(self, root: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [*GRAFT, "serve", "--port", "0", "--json", "-C", str(root), *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        # One JSON document over several lines.
        text = ""
        while True:
            line = self.process.stdout.readline()
            assert line, f"the endpoint ended: {text}"
            text += line
            try:
                found = json.loads(text)
            except json.JSONDecodeError:
                continue
            assert "url" in found, found
            self.url = str(found["url"])
            break
        self.port = int(self.url.rpartition(":")[2])

    def memory(self) -> tuple[float, float]:
        """The peak of the engine process, and of the gateway, in GiB."""
        engine = int(read_health(self.url)["engine"]["pid"])
        return tuple(_peak(pid) for pid in (engine, self.process.pid))  # type: ignore[return-value]

    def kill(self) -> None:
        """As the kernel would: the gateway and its engine at once."""
        engine = int(read_health(self.url)["engine"]["pid"])
        os.kill(self.process.pid, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(STOP_SECONDS)


def _peak(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 2**20


async def ask(client: Client, model: str, text: str, **options: Any) -> tuple[int, dict[str, str], int]:
    """Status, headers and the tokens that were written."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, **options}
    reply = await client.send("POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=JSON)
    data = json.loads(await reply.read())
    usage = data.get("usage", {})
    LONGEST[0] = max(LONGEST[0], usage.get("prompt_tokens", 0))
    return reply.status, dict(reply.headers), usage.get("completion_tokens", 0)


async def speed(port: int, models: list[str], texts: list[str]) -> float:
    """Tokens a second of one batch, each request to its model."""
    client = Client(port=port)
    started = time.perf_counter()
    found = await asyncio.gather(*(ask(client, m, t) for m, t in zip(models, texts, strict=True)))
    took = time.perf_counter() - started
    client.close()
    assert all(status == 200 for status, _, _ in found)
    return sum(tokens for _, _, tokens in found) / took


def measure_speed(port: int, aliases: list[str], texts: list[str], *, rounds: int) -> dict[str, float]:
    """One adapter and seven in a batch of seven requests, in turn, so that both see the same machine."""
    asyncio.run(speed(port, aliases, texts[:BATCH]))
    one, seven, bare = [], [], []
    for number in range(rounds):
        batch = texts[number * BATCH : (number + 1) * BATCH]
        alias = aliases[number % len(aliases)]
        one.append(asyncio.run(speed(port, [alias] * BATCH, batch)))
        seven.append(asyncio.run(speed(port, aliases, batch)))
        bare.append(asyncio.run(speed(port, ["base"] * BATCH, batch)))
    ratios = [b / a for a, b in zip(one, seven, strict=True)]
    return {
        "one_adapter_tokens_per_second": statistics.median(one),
        "seven_adapters_tokens_per_second": statistics.median(seven),
        "base_tokens_per_second": statistics.median(bare),
        "seven_against_one": statistics.median(ratios),
        "seven_against_one_lowest": min(ratios),
        "rounds": rounds,
    }


async def route_all(port: int, asked: list[tuple[str, str]]) -> dict[str, float]:
    """How often the family's route is the model that the question is for."""
    client = Client(port=port)
    right = sure = 0
    for text, model in asked:
        _, headers, _ = await ask(client, "auto", text, max_tokens=1)
        route = headers["x-graft-route"]
        right += route.startswith(f"{model} ")
        sure += "unsure" not in route
    client.close()
    return {"questions": len(asked), "right": right, "sure": sure}


async def kill_specialist(
    port: int, asked: list[tuple[str, str]], kill: Any, *, requests: int
) -> dict[str, Any]:
    """Requests to the family under load; the specialist's server is killed after a third of them."""
    client, room = Client(port=port), asyncio.Semaphore(4)
    statuses: Counter[int] = Counter()
    by: Counter[str] = Counter()
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        text, _ = asked[number % len(asked)]
        async with room:
            if number == requests // 3:
                await asyncio.to_thread(kill)
            status, headers, _ = await ask(client, "auto", text, max_tokens=16)
        statuses[status] += 1
        route, fallback = headers.get("x-graft-route", ""), headers.get("x-graft-fallback")
        if route.startswith(f"{SPECIALIST} ") and fallback is None:
            by["specialist"] += 1
        elif fallback is not None or "is not ready" in route:
            by["main, as the header says"] += 1
        else:
            by["other members"] += 1
        done += 1

    await asyncio.gather(*(one(number) for number in range(requests)))
    client.close()
    failed = sum(count for status, count in statuses.items() if status != 200)
    return {"requests": requests, "failed": failed, "answered_by": dict(by)}


def plan_memory(root: Path, *, context: int) -> dict[str, Any]:
    """What `graft plan serve` says for one base with seven adapters on this machine's embedded engine."""
    words = ("plan", "serve", "--model", "smollm2-135m-instruct", "--engine", "embedded", "--adapters", "7")
    words += ("--rank", "8", "--adapter-layers", "4", "--users", str(BATCH))
    words += ("--context", str(context), "--answer", str(TOKENS), "--json")
    made = subprocess.run([*GRAFT, *words], capture_output=True, text=True, cwd=root, check=False)
    return {"command": f"graft {' '.join(words)}", **json.loads(made.stdout)["memory_gib"]}


class Parts:
    """Figures by part, kept as soon as each is measured."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def measure(self, name: str, part: Callable[[], Any]) -> Any:
        """The figures of a part; those of an earlier run where there are some."""
        if name in self.figures:
            print(f"{name}: measured before", flush=True)
            return self.figures[name]
        started, load = time.time(), os.getloadavg()[0]
        found = part()
        self.figures[name] = {**found, "seconds": round(time.time() - started, 1), "load": round(load, 1)}
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(self.figures, indent=1))
        written.replace(self._path)
        print(f"{name}: {json.dumps(self.figures[name])}", flush=True)
        return self.figures[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=int, help="Train on so many rows a model instead of the example's 32.")
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gate-cases", type=int, default=21, help="Cases of the family's gate.")
    parser.add_argument(
        "--context", type=int, default=128, help="Tokens of a prompt and its answer that are planned for."
    )
    asked = parser.parse_args()
    root = (asked.folder or Path(tempfile.mkdtemp(prefix="seven-models-"))).absolute()
    if not (root / "graft.yaml").exists():
        shutil.copytree(EXAMPLE, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".graft"))
        shorten(root / "graft.yaml", asked.rows)
    parts = Parts(root / "parts.json")
    parts.measure("plan", lambda: plan_memory(root, context=asked.context))
    project = open_project(root)
    parts.measure("training", lambda: train(project))
    parts.measure("router", lambda: train_router(project))
    held_out = questions(project)
    served = parts.measure("served", lambda: serve_all(root, project, held_out, rounds=asked.rounds))
    assert served["longest_prompt"] + TOKENS <= asked.context, "the plan was for shorter requests"
    parts.measure("killed", lambda: _kill(root, held_out, requests=asked.requests))
    parts.measure("gate", lambda: gate(root, project, cases=asked.gate_cases))
    planned, figures = parts.figures["plan"], dict(parts.figures)
    figures["memory_against_plan"] = served["engine_peak_gib"] / planned["value"]
    print(save_results("seven_models", figures))


def shorten(file: Path, rows: int | None) -> None:
    settings = yaml.safe_load(file.read_text())
    if rows is not None:
        settings["train"] |= {"max_rows": rows, "batch_rows": min(rows, settings["train"]["batch_rows"])}
    file.write_text(yaml.safe_dump(settings, sort_keys=False))


def train(project: Project) -> dict[str, Any]:
    project.train_all()
    rows = project.settings.train.max_rows
    return {
        "rows_a_model": rows,
        "releases": {name: release[:12] for name, release in release_all(project).items()},
    }


def train_router(project: Project) -> dict[str, Any]:
    made = project.train_router()
    return _router_facts(made.card.model_dump(mode="json"), made.milliseconds)


def serve_all(
    root: Path, project: Project, held_out: list[tuple[str, str]], *, rounds: int
) -> dict[str, Any]:
    """Routes, speed and memory of one endpoint."""
    served = Served(root)
    try:
        aliases = ["champion", *(f"{name}/champion" for name in list(project.settings.all_models)[1:])]
        routed = asyncio.run(route_all(served.port, held_out[:60]))
        texts = [text for text, _ in held_out] * 3
        found = measure_speed(served.port, aliases, texts, rounds=rounds)
        engine, gateway = served.memory()
    finally:
        served.stop()
    return {
        "routed": routed,
        "speed": found,
        "engine_peak_gib": engine,
        "gateway_peak_gib": gateway,
        "longest_prompt": LONGEST[0],
    }


def gate(root: Path, project: Project, *, cases: int) -> dict[str, Any]:
    """`graft gate --family` as the family is, and with the main model's adapter as the new specialist."""
    shortened = root / "gate"
    shortened.mkdir(exist_ok=True)
    _copy_state(root, shortened)
    settings = yaml.safe_load((root / "graft.yaml").read_text())
    settings["serve"]["family"]["gate"] = {**GATE, "max_cases": cases}
    settings["evaluate"]["max_new_tokens"] = GATE_TOKENS
    (shortened / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    family = open_project(shortened)
    with family.open() as work:
        outcome = find_trained(work, project.settings.main_model)
    assert outcome is not None
    with family.with_model(SPECIALIST).open() as work:
        new = import_release(work, Path(outcome.adapter_folder)).release.id
    return {"as_it_is": _run_gate(shortened), "with_a_new_member": _run_gate(shortened, "--release", new)}


def _run_gate(root: Path, *words: str) -> dict[str, Any]:
    started = time.time()
    command = [*GRAFT, "gate", "--family", "--json", "-C", str(root), *words]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = json.loads(made.stdout)
    assert "decision" in verdict, verdict
    kept = ("rule", "outcome", "sentence")
    return {
        "decision": verdict["decision"],
        "exit_code": made.returncode,
        "seconds": round(time.time() - started, 1),
        "rules": [{name: rule[name] for name in kept} for rule in verdict["rules"]],
        "notes": verdict["notes"],
    }


def _copy_state(root: Path, to: Path) -> None:
    for name in (".graft", "logs"):
        if not (to / name).exists():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("serving", "*.lock"))


def _router_facts(card: dict[str, Any], milliseconds: float) -> dict[str, Any]:
    kept = {name: card[name] for name in ("accuracy", "sure_accuracy", "unsure")}
    return {**kept, "milliseconds": milliseconds}


def _kill(root: Path, held_out: list[tuple[str, str]], *, requests: int) -> dict[str, Any]:
    """The specialist has a server of its own; the family is in front of it."""
    specialist = Served(root)
    settings = yaml.safe_load((root / "graft.yaml").read_text())
    front = root / "front"
    try:
        front.mkdir(exist_ok=True)
        _copy_state(root, front)
        endpoint = {"url": f"{specialist.url}/v1", "model": f"{SPECIALIST}/champion"}
        settings["serve"]["failover"] = {"endpoints": {SPECIALIST: endpoint}, "probe_seconds": 0.5}
        settings["serve"]["family"]["remote"] = {SPECIALIST: SPECIALIST}
        (front / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        family = Served(front)
        try:
            _await_remote(family)
            mine = [pair for pair in held_out if pair[1] == SPECIALIST]
            others = [pair for pair in held_out if pair[1] != SPECIALIST][: len(mine)]
            mixed = [pair for both in zip(mine, others, strict=False) for pair in both]
            return asyncio.run(kill_specialist(family.port, mixed, specialist.kill, requests=requests))
        finally:
            family.stop()
    finally:
        specialist.stop()


def _await_remote(family: Served) -> None:
    async def main() -> None:
        client, until = Client(port=family.port), time.monotonic() + 60
        headers = (*JSON, ("x-graft-role", SPECIALIST))
        body = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        while time.monotonic() < until:
            reply = await client.send(
                "POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=headers
            )
            await reply.read()
            if "is not ready" not in reply.headers.get("x-graft-route", "is not ready"):
                return
            await asyncio.sleep(0.2)
        raise SystemExit("the specialist's server was never ready")

    asyncio.run(main())


if __name__ == "__main__":
    main()
