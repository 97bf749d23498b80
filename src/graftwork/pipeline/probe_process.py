"""The probe as a process of its own: `python -m graftwork.pipeline.probe_process JOB`.

In: a ProbeJob, as JSON or as the path of a file with it. Out: one JSON line on standard output, ProbeFacts;
on standard error a JSON line before each part: what comes, and the seconds that are still expected.
Imports nothing that a machine with torch and transformers lacks.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from graftwork.records.fit import DeviceName, Form, ProbedStep, ProbeFacts, ProbeJob
from graftwork.records.units import GIB

EXPECTED = {
    "starting torch": 4.0,
    "the context": 1.0,
    "products at the model's sizes": 2.0,
    "copying memory": 0.5,
    "transfers to the card and back": 0.5,
    "calling a kernel": 0.2,
    "the disk": 1.0,
}
"""Seconds, as they were on the machines at hand: for the time left, nothing else."""
CARD_STEP_SECONDS = {4: 18.0, 2: 3.0}
"""By layers: the first step of a size is compiled."""
PROCESSOR_STEP_SECONDS = 5.0
COMPILE_TWICE_SECONDS = 45.0
"""Less time than that does for one form and one number of tokens."""
FIRST_WITH_EIGHT = 8.9
LAYERS = (4, 2)


class Probing:
    """Does one part after the other, says so, and leaves out what time or the machine does not allow."""

    def __init__(self, job: ProbeJob, parts: list[str]) -> None:
        self.job = job
        self.begun = time.perf_counter()
        self.left_out: list[str] = []
        self.took: dict[str, float] = {}
        self._ahead = {part: EXPECTED[part] for part in parts}

    def expect(self, part: str, seconds: float) -> None:
        self._ahead[part] = seconds

    def pass_over(self, *parts: str) -> None:
        """A processor has none of these: nothing is missing."""
        for part in parts:
            self._ahead.pop(part, None)

    def do(self, part: str, work: Callable[[], Any]) -> Any:
        """What `work` found; None where it failed. A part that is told nothing of counts as short."""
        left = round(sum(self._ahead.values()), 1)
        print(json.dumps({"doing": part, "left_seconds": left}), file=sys.stderr, flush=True)
        self._ahead.pop(part, None)
        begun = time.perf_counter()
        try:
            return work()
        except (RuntimeError, OSError, ImportError, ValueError, NotImplementedError) as error:
            # A probe is for machines that nobody knows: one part that fails must not cost the others.
            self.left_out.append(
                f"{part}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            return None
        finally:
            self.took[part] = round(time.perf_counter() - begun, 2)

    def has_time(self, part: str, *, quick: bool = False) -> bool:
        """A `quick` part has been prepared by the one before it."""
        if quick or time.perf_counter() - self.begun < self.job.seconds:
            return True
        self._ahead.pop(part, None)
        self.left_out.append(f"{part}: the {self.job.seconds:.0f} seconds were spent")
        return False


def probe(job: ProbeJob) -> ProbeFacts:
    """Everything that can be measured on this machine."""
    from graftwork.model.probe_places import used_before

    before = used_before()
    probing = Probing(job, list(EXPECTED))
    torch = probing.do("starting torch", _start)
    if torch is None:
        raise ModuleNotFoundError("torch", name="torch")
    on_card = torch.cuda.is_available()
    facts = _card_facts(job, probing, before) if on_card else _processor_facts(job, probing)
    return ProbeFacts(
        **facts,
        shape=job.shape,
        rank=job.rank,
        took=probing.took,
        left_out=tuple(probing.left_out),
        seconds=round(time.perf_counter() - probing.begun, 2),
        at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _start() -> Any:
    import torch

    return torch


def _card_facts(job: ProbeJob, probing: Probing, before: float | None) -> dict[str, Any]:
    import torch

    from graftwork.model import probe_places, probe_products

    card = torch.cuda.get_device_properties(0)
    capability = card.major + card.minor / 10
    forms = job.forms or (("eight",) if capability >= FIRST_WITH_EIGHT else ("whole",))
    ahead = [(form, tokens, layers) for tokens in job.tokens for form in forms for layers in LAYERS]
    if job.seconds < COMPILE_TWICE_SECONDS:
        ahead = ahead[: len(LAYERS)]
    for one in ahead:
        probing.expect(_named(*one), CARD_STEP_SECONDS[one[-1]])
    context = probing.do("the context", lambda: probe_places.measure_context(before))
    sizes = probe_products.measure_products
    eight = capability >= FIRST_WITH_EIGHT
    products = probing.do(
        "products at the model's sizes", lambda: tuple(sizes(job.shape, device="cuda", eight=eight))
    )
    copied = probing.do("copying memory", lambda: probe_products.measure_copy(device="cuda"))
    transfers = probing.do("transfers to the card and back", probe_places.measure_transfers)
    launch = probing.do("calling a kernel", lambda: probe_products.measure_launch(device="cuda"))
    disk = probing.do("the disk", lambda: probe_places.measure_disk(Path(job.folder)))
    torch.cuda.empty_cache()
    return {
        "device": _device("cuda", card.name),
        "memory_gib": card.total_memory / GIB,
        "capability": capability,
        "threads": torch.get_num_threads(),
        "products": products or (),
        "copy_bytes_s": copied or 0.0,
        "context_bytes": context,
        "to_device_bytes_s": transfers and transfers.to_device,
        "from_device_bytes_s": transfers and transfers.from_device,
        "launch_seconds": launch,
        "disk_write_bytes_s": disk and disk.write,
        "disk_read_bytes_s": disk and disk.read,
        "steps": _card_steps(job, probing, ahead),
    }


def _card_steps(
    job: ProbeJob, probing: Probing, ahead: list[tuple[Form, int, int]]
) -> tuple[ProbedStep, ...]:
    from graftwork.pipeline.probe_step import probe_card_step

    found: list[ProbedStep] = []
    for form, tokens, layers in ahead:
        name = _named(form, tokens, layers)
        # With the same sizes nothing is compiled again.
        quick = any(step.tokens == tokens and step.tuning and step.tuning.form == form for step in found)
        if probing.has_time(name, quick=quick):
            work = partial(probe_card_step, job, layers=layers, tokens=tokens, form=form)
            step = probing.do(name, work)
            found += [] if step is None else [step]
    return tuple(found)


def _named(form: Form, tokens: int, layers: int) -> str:
    bits = {"whole": 16, "eight": 8, "four": 4}[form]
    return f"a step of {layers} layers, {tokens:,} tokens, weights in {bits} bits"


def _processor_facts(job: ProbeJob, probing: Probing) -> dict[str, Any]:
    import torch

    from graftwork.model import probe_places, probe_products
    from graftwork.model.probe import describe_device
    from graftwork.pipeline.probe_step import probe_processor_step

    here = describe_device(threads=job.threads)
    torch.set_num_threads(here.threads)
    for layers in LAYERS:
        probing.expect(f"a step of {layers} layers", PROCESSOR_STEP_SECONDS)
    probing.pass_over("the context", "transfers to the card and back")
    products = probing.do(
        "products at the model's sizes",
        lambda: tuple(probe_products.measure_products(job.shape, device="cpu", eight=False)),
    )
    copied = probing.do("copying memory", lambda: probe_products.measure_copy(device="cpu"))
    launch = probing.do("calling a kernel", lambda: probe_products.measure_launch(device="cpu"))
    disk = probing.do("the disk", lambda: probe_places.measure_disk(Path(job.folder)))
    gflops = sorted(one.flops for one in products or ())[len(products or ()) // 2] / 1e9 if products else 30.0
    steps: list[ProbedStep] = []
    for layers in LAYERS:
        name = f"a step of {layers} layers"
        if probing.has_time(name):
            step = probing.do(name, partial(probe_processor_step, job, layers=layers, gflops=gflops))
            steps += [] if step is None else [step]
    return {
        "device": _device("cpu", here.name),
        "memory_gib": here.memory_gib,
        "threads": here.threads,
        "products": products or (),
        "copy_bytes_s": copied or 0.0,
        "launch_seconds": launch,
        "disk_write_bytes_s": disk and disk.write,
        "disk_read_bytes_s": disk and disk.read,
        "steps": tuple(steps),
    }


def _device(kind: str, name: str) -> DeviceName:
    from graftwork.model.probe_here import name_device

    here = name_device()
    driver = here.driver if here.kind == kind else ""
    return DeviceName.model_validate({"kind": kind, "name": name, "driver": driver, "torch": here.torch})


def main() -> int:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    asked = sys.argv[1]
    job = ProbeJob.from_json(asked if asked.lstrip().startswith("{") else Path(asked).read_bytes())
    print(probe(job).model_dump_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
