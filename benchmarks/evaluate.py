"""Cases a minute of `graft eval`'s worker against one-by-one transformers `generate`, and of a second time.

Run: python benchmarks/evaluate.py [--cases 24] [--new-tokens 40] [--rounds 2] [--example] [--vllm]. The
same base and cases, greedy; rounds interleaved, medians of the ratios. Ours is the whole of it: batches,
journal and kept answers. `--example` shows all the worked example that an untrained base is shown. The
second evaluation is of the same subject in another folder: everything comes from the kept answers. `--vllm`
asks vLLM too, where it is installed, in a process of its own that works only when it is its turn; loading
it is told apart.
"""

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.ask.runner import CaseRunner
from graftwork.evaluate.cases import asked_messages
from graftwork.inference.embedded import EmbeddedEngine
from graftwork.inference.engine import DecodingSettings
from graftwork.inference.selection import settle, source_of
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base
from graftwork.records.interaction import Message, Origin
from graftwork.records.release import PromptVariant
from graftwork.records.report import Case, EvalJob

LOG = Path(__file__).parents[1] / "examples" / "cited_answers" / "logs" / "interactions.jsonl"


class Quiet:
    def beat(self, *_arguments: Any, **_detail: Any) -> None: ...


def read_log(most: int) -> list[Case]:
    cases = []
    for number, line in enumerate(LOG.read_text().splitlines()[: most + 1], 1):
        *turns, reply = json.loads(line)["messages"]
        messages = tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)
        origin = Origin(file=LOG.name, line=number)
        cases.append(Case(id=str(number), origin=origin, messages=messages, reference=reply["content"]))
    return cases


def ask_ours(model: Any, job: EvalJob, cases: list[Case]) -> float:
    begun = time.perf_counter()
    CaseRunner(job, engine=model, progress=Quiet(), stop_asked=lambda: False).ask_all(cases)
    return time.perf_counter() - begun


def ask_one_by_one(model: Any, asked: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    begun, said = time.perf_counter(), []
    for prompt in asked:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        said.append(out[0, len(prompt) :].tolist())
    return time.perf_counter() - begun, said


def serve_vllm(job: EvalJob, cases: list[Case], pipe: Connection) -> None:
    """The third party: in another process, since vLLM changes the threads and the settings of its own."""
    from graftwork.inference.vllm_engine import VllmEngine

    begun = time.perf_counter()
    model = VllmEngine(source_of(job))
    prompt = model.render(asked_messages(job, cases[0]))
    model.answer([prompt], DecodingSettings(job.max_new_tokens))
    pipe.send(time.perf_counter() - begun)
    while folder := pipe.recv():
        fresh = job.model_copy(update={"folder": folder})
        pipe.send(ask_ours(model, fresh, cases))


def start_vllm(job: EvalJob, cases: list[Case]) -> tuple[Connection, float]:
    """How to ask it, and the seconds until it can be asked."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve_vllm, args=(job, cases, there), daemon=True).start()
    there.close()
    return here, here.recv()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--example", action="store_true")
    parser.add_argument("--vllm", action="store_true")
    given = parser.parse_args()
    first, *cases = read_log(given.cases)
    shown = tuple(m for m in first.messages if m.role != "system")
    example = (*shown, Message(role="assistant", content=first.reference)) if given.example else ()
    base = find_base(EMBEDDED, project_folder=Path())
    with tempfile.TemporaryDirectory() as scratch:
        job = EvalJob(
            subject="base",
            folder=scratch,
            base_folder=base.folder,
            adapter_folder=None,
            cases_file="",
            worked_example=example,
            max_new_tokens=given.new_tokens,
            batch_size=32,
            threads=given.threads,
            identity=base.revision,
        )
        # Two copies: our generator chooses another attention, which the peer shall not profit from.
        ours, peer = EmbeddedEngine(source_of(settle(job))), load_base(Path(base.folder))
        asked = [ours.render(PromptVariant(examples=example).apply(c.messages)).tokens for c in cases]
        ours.answer([ours.render(cases[0].messages)], DecodingSettings(given.new_tokens))
        ask_one_by_one(peer, asked[:1], 4)
        times: dict[str, list[float]] = {"ours": [], "one by one": [], "second time": []}
        vllm, loading = None, 0.0
        if given.vllm and importlib.util.find_spec("vllm"):
            named = job.model_copy(update={"engine": "vllm", "precision": "float32"})
            vllm, loading = start_vllm(named, cases)
            times["vllm"] = []
        for number in range(given.rounds):
            kept = str(Path(scratch) / f"answers-{number}")
            fresh = job.model_copy(update={"folder": f"{scratch}/first-{number}", "answers_folder": kept})
            times["ours"].append(ask_ours(ours, fresh, cases))
            seconds, said = ask_one_by_one(peer, asked, given.new_tokens)
            times["one by one"].append(seconds)
            later = fresh.model_copy(update={"folder": f"{scratch}/second-{number}"})
            times["second time"].append(ask_ours(ours, later, cases))
            if vllm is not None:
                vllm.send(f"{scratch}/vllm-{number}")
                times["vllm"].append(vllm.recv())
        answers = {a.case_id: a.text for a in read_answers(Path(fresh.folder))}
        theirs = {a.case_id: a.text for a in read_answers(Path(scratch) / f"vllm-{given.rounds - 1}")}
        if vllm is not None:
            vllm.send("")
        same = sum(answers[c.id] == ours.template.decode(s) for c, s in zip(cases, said, strict=True))
    print(
        f"{len(cases)} cases, prompts of {min(map(len, asked))}–{max(map(len, asked))} tokens, up to "
        f"{given.new_tokens} new ones; {same} of {len(cases)} answers are the peer's to the letter"
    )
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(times["one by one"], found, strict=True))
        pace = 60 * len(cases) / statistics.median(found)
        print(f"{name:<12} {pace:9.1f} cases/min   {ratio:8.2f} × one by one")
    if "vllm" in times:
        alike = sum(theirs[case.id] == answers[case.id] for case in cases)
        print(f"vllm took {loading:.0f} s to load; {alike} of {len(cases)} answers are ours to the letter")
    elif given.vllm:
        print("vllm is not installed here")


if __name__ == "__main__":
    main()
