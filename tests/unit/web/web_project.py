"""Makes a project for the web page without training: logs, dataset, runs, evaluation, releases, captures.

    python tests/unit/web/web_project.py FOLDER --cases 10000 --runs 1000

In: a folder that does not exist yet, sizes. Out: a project that `graft ui` shows in full. Texts hold hostile
markup. The logs are audited and prepared as always; the rest is written as the steps would write it.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import web_extras

from graftwork.api.project import Project, open_project
from graftwork.data.project import PreparedData
from graftwork.evaluate.ask.answers import ANSWERS_FILE
from graftwork.evaluate.ask.worker import GENERATION_FILE
from graftwork.evaluate.comparison import wear_of, what_cases_show
from graftwork.evaluate.project import Evaluated
from graftwork.evaluate.report import make_report, score, slice_report
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.files.disk import folder_digest
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Figure
from graftwork.records.fleet import FleetJob, MachineBill
from graftwork.records.interaction import Capture, Feedback, Message, Origin
from graftwork.records.plan import DeviceFacts, Plan, Residual
from graftwork.records.release import AliasMove, Release
from graftwork.records.report import Answer, Case, Generation, Report, RuleResult, Verdict
from graftwork.records.run import TrainingEvaluation, TrainOutcome, TrainStep
from graftwork.registry.manifest import Lineage, ReleaseContext
from graftwork.registry.project import open_store
from graftwork.registry.publish import publish
from graftwork.store.captures import FeedbackStore

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)> \u202egnp.exe"
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
START = NOW - timedelta(hours=28)
"""So that the page shows a project of these days."""
ROLES = ("planner", "writer", "checker")
SETTINGS = EvaluateSettings.model_validate(
    {"metrics": ["token_f1"], "checks": [{"name": "names_the_place", "contains": "pond"}]}
)


def make_project(
    folder: Path, *, cases: int = 60, runs: int = 6, captures: int = 80, base: str = "smollm2-135m-instruct"
) -> Project:
    """Make the project; `base` may be a folder."""
    write_sources(folder, base)
    project = open_project(folder)
    project.run_to("audit")
    prepared = project.run_to("prepare").get("prepare", PreparedData)
    with project.open() as work:
        plan = make_plan(prepared)
        work.ledger.put(
            "plan", fingerprint="p", output=plan.model_dump(mode="json"), finished_at=at(1), seconds=0.4
        )
        newest = add_runs(work, plan, count=runs)
        report = add_evaluation(work, newest, count=cases)
        verdict = make_verdict(report)
        work.ledger.put(
            "gate", fingerprint="g", output=verdict.model_dump(mode="json"), finished_at=at(4), seconds=0.1
        )
        released = add_releases(work, prepared, plan, newest, report, verdict)
        body = released[-1].model_dump(mode="json")
        work.ledger.put("release", fingerprint="r", output=body, finished_at=at(5), seconds=1.2)
        add_captures(work, released, count=captures)
        add_jobs(work, newest)
        web_extras.mark_fresh(work)
        web_extras.add_cycles(work, now=NOW.timestamp())
        web_extras.add_forecast(work)
    web_extras.add_generations(folder)
    web_extras.write_week(folder, start=NOW.replace(hour=0))
    return project


def write_sources(folder: Path, base: str) -> None:
    (folder / "logs").mkdir(parents=True)
    (folder / "graft.yaml").write_text(
        f"project: corner-shop\nbase: {base}\n"
        "data: {logs: [logs/interactions.jsonl], test: 0.3, validation: 0.1}\n"
        "evaluate: {metrics: [token_f1]}\n"
        "gate: {rules: [{metric: token_f1, over: 0.5}], primary: token_f1}\n"
        f"{web_extras.SETTINGS}"
    )
    chance = random.Random(7)
    lines = []
    for number in range(90):
        place = chance.choice(("pond", "gate", "wall", "court", "terrace"))
        question = f"Where is the fern number {number} of garden {chance.randrange(99)}?"
        if number % 30 == 3:
            question += f" {HOSTILE}"
        reply = f"It grows by the {place}, since 19{number:02}."
        if number % 20 == 5:
            reply = "TODO"
        lines.append({
            "id": f"row-{number}",
            "status": "error" if number % 25 == 9 else "success",
            "group": ROLES[number % 3],
            "session": f"s-{number // 2}",
            "messages": [{"role": "system", "content": "You know the gardens."},
                         {"role": "user", "content": question}, {"role": "assistant", "content": reply}],
        })  # fmt: skip
    lines.append({**lines[0], "id": "row-again"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "logs" / "interactions.jsonl").write_text(text)


def at(hours: float) -> str:
    return (START + timedelta(hours=hours)).isoformat(timespec="seconds")


def make_plan(prepared: PreparedData) -> Plan:
    dataset = prepared.dataset
    return Plan(
        base=dataset.base,
        base_fingerprint=dataset.base_fingerprint,
        dataset_hash=dataset.content_hash,
        method="lora",
        dtype="float32",
        device=DeviceFacts(kind="cpu", name="a processor of two cores", memory_gib=8, threads=2),
        certainty="computed",
        total_parameters=Figure.exact(134_515_008),
        trainable_parameters=Figure.exact(2_442_240),
        peak_memory_gib=Figure.about(2.4, down=0.9, up=1.1, unit="GiB"),
        disk_gib=Figure.exact(0.4, "GiB"),
        tokens=Figure.exact(40_000),
        trained_tokens=Figure.exact(9_000),
        steps=Figure.exact(72),
        tokens_per_second=Figure.about(300, down=0.7, up=1.3, unit="tokens/s"),
        minutes=Figure.about(6, down=0.8, up=1.4, unit="min"),
        fits=True,
        train={"rank": 16, "learning_rate": 2e-3, "epochs": 2, "batch_size": 8},
    )


def add_runs(work: OpenProject, plan: Plan, *, count: int) -> TrainOutcome:
    """Runs of which a few have journals; one failed, the newest is done. Returns the newest outcome."""
    newest = None
    for number in range(count):
        run_id = f"{number:06x}{(number * 7919) % 0xFFFFFF:06x}"
        folder = work.project.runs / run_id
        settings = {**plan.train, "learning_rate": 2e-3 / (1 + number % 3)}
        entry_plan = plan.model_copy(update={"train": settings})
        work.runs.create(
            run_id, folder=str(folder), plan=entry_plan.model_dump(mode="json"), when=at(2 * number / count)
        )
        if count - number <= 6:
            write_run(folder, steps=72, seed=number)
        adapter = write_adapter(folder / "adapter", number) if count - number <= 2 else folder / "adapter"
        outcome = make_outcome(run_id, adapter, number, plan)
        if number == count - 3:
            error = {
                "what": "the worker was killed by the kernel",
                "why": "it held 7.9 of 8.0 GiB\nlast step 31 of 72",
                "fix": "set `train.batch_size: 4`, then `graft run` continues from step 30",
                "exit_code": 3,
            }
            work.runs.update(run_id, state="failed", when=at(2 * number / count + 0.1), error=error)
        else:
            body = outcome.model_dump(mode="json")
            work.runs.update(run_id, state="done", when=at(2 * number / count + 0.1), outcome=body)
            newest = outcome
    assert newest is not None
    work.ledger.put(
        "train", fingerprint="t", output=newest.model_dump(mode="json"), finished_at=at(2), seconds=400.0
    )
    return newest


def write_adapter(folder: Path, number: int) -> Path:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    folder.mkdir(parents=True)
    content = len(header).to_bytes(8, "little") + header.encode() + number.to_bytes(4, "little")
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    return folder


def write_run(folder: Path, *, steps: int, seed: int) -> None:
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    began = START.timestamp()
    with (folder / "steps.jsonl").open("w") as journal:
        for number in range(1, steps + 1):
            journal.write(make_step(number, chance, began).model_dump_json() + "\n")
    vitals = [{"at": began + 5 * n, "memory_gib": 2 + n / 100, "cpu_cores": 1.8} for n in range(30)]
    (folder / "vitals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in vitals))
    saved = [{"at": began + 60 * n, "step": 10 * n, "folder": f"step-{10 * n:06}"} for n in range(1, 4)]
    (folder / "saved.jsonl").write_text("".join(json.dumps(line) + "\n" for line in saved))
    messages = [{"at": began, "message": f"training begins {HOSTILE}"}]
    (folder / "messages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in messages))
    (folder / "checkpoints" / "step-000030").mkdir(parents=True)
    (folder / "worker.log").write_text(f"loading the base\n{HOSTILE}\nstep 1\n")


def make_step(number: int, chance: random.Random, began: float) -> TrainStep:
    return TrainStep(
        step=number,
        loss=0.1 + 1.1 * math.exp(-number / 12) + chance.random() / 8,
        learning_rate=2e-3 * (1 - number / 80),
        gradient_norm=0.3 + chance.random() / 4,
        tokens=900 + chance.randrange(200),
        trained_tokens=200,
        seconds=3.0 + chance.random(),
        at=began + 4 * number,
    )


def make_outcome(run_id: str, adapter: Path, number: int, plan: Plan) -> TrainOutcome:
    return TrainOutcome(
        run_id=run_id,
        adapter_folder=str(adapter),
        adapter_hash=folder_digest(adapter) if adapter.is_dir() else "a" * 64,
        base_hash_before="h" * 64,
        base_hash_after="h" * 64,
        steps=72,
        epochs=2.0,
        first_loss=1.2,
        final_loss=0.12 + (number % 5) / 100,
        validation_loss_before=1.14,
        validation_loss_after=0.18,
        seconds=330 + number % 60,
        load_seconds=4,
        tokens_per_second=310 + number % 9,
        peak_memory_gib=2.38,
        trainable_parameters=2_442_240,
        restarts=0,
        replayed_steps=0,
        replay_identical=None,
        rows=60,
        looks=tuple(
            TrainingEvaluation(
                step=step, metric="token_f1", value=0.4 + step / 200, cases=20, seconds=2, better=True
            )
            for step in (20, 40, 60)
        ),
        residuals=(
            Residual(name="minutes", planned=plan.minutes, actual=5.6),
            Residual(name="peak_memory_gib", planned=plan.peak_memory_gib, actual=2.9),
        ),
    )


def add_evaluation(work: OpenProject, newest: TrainOutcome, *, count: int) -> Report:
    cases = tuple(make_case(number) for number in range(count))
    answers = {
        "base": [make_answer(case, number, "base") for number, case in enumerate(cases)],
        "adapter": [make_answer(case, number, "adapter") for number, case in enumerate(cases)],
        "log": [make_answer(case, number, "log") for number, case in enumerate(cases)],
    }
    scored = {
        name: score(cases, answers=given, generation=make_generation(name, count), settings=SETTINGS)
        for name, given in answers.items()
    }
    report = make_report(
        cases, baseline=scored["base"], candidate=scored["adapter"], settings=SETTINGS, others=[scored["log"]]
    )
    report = slice_report(report, cases, by=("role",))
    report = report.model_copy(
        update={"wear": wear_of(report, candidates=1, look=1), "power": what_cases_show(count)}
    )
    place = work.project.evaluations
    place.mkdir(parents=True, exist_ok=True)
    (place / "cases.jsonl").write_text("".join(case.model_dump_json() + "\n" for case in cases))
    folders = {}
    for name, given in answers.items():
        (place / name).mkdir()
        lines = "".join(answer.model_dump_json() + "\n" for answer in given)
        (place / name / ANSWERS_FILE).write_text(lines)
        (place / name / GENERATION_FILE).write_text(make_generation(name, count).model_dump_json())
        folders[name] = str(place / name)
    evaluated = Evaluated(
        cases_file=str(place / "cases.jsonl"),
        folders=folders,
        report=report,
        adapter_hash=newest.adapter_hash,
    )
    work.ledger.put(
        "evaluate", fingerprint="e", output=evaluated.model_dump(mode="json"), finished_at=at(3), seconds=90
    )
    return report


def make_case(number: int) -> Case:
    text = f"Where is the fern number {number}?" + (f" {HOSTILE}" if number == 1 else "")
    return Case(
        id=f"case-{number}",
        origin=Origin(file="logs/interactions.jsonl", line=number % 90 + 1),
        messages=(
            Message(role="system", content="You know the gardens."),
            Message(role="user", content=text),
        ),
        reference=f"It grows by the pond, since 19{number % 100:02}.",
        group=ROLES[number % 3],
    )


def make_answer(case: Case, number: int, subject: str) -> Answer:
    text = case.reference
    if subject == "base" and number % 3:
        text = f"Look by the gate of garden {number % 9}, please."
    if subject == "adapter" and number % 10 == 3:
        text = f"It grows elsewhere. {HOSTILE}"
    return Answer(
        case_id=case.id,
        text=text,
        tokens=9,
        prompt_tokens=31,
        finish_reason="stop",
        seconds=0.2 + number % 7 / 10,
    )


def make_generation(subject: str, count: int) -> Generation:
    return Generation(
        subject=subject,
        answers=count,
        seconds=60,
        tokens_per_second=150,
        single_latency_seconds=(0.4, 0.5, 0.6),
        peak_memory_gib=1.2,
        settings={"temperature": 0},
    )


def make_verdict(report: Report) -> Verdict:
    metric = report.candidate.metrics["token_f1"]
    rule = RuleResult(
        metric="token_f1",
        rule="token F1 over 50 %",
        outcome="pass",
        value=metric.value,
        low=metric.low,
        high=metric.high,
        limit=0.5,
        sentence=f"Token F1: {metric.value:.1%}; the lower bound {metric.low:.1%} is over 50 %.",
    )
    return Verdict(
        decision="deploy", reason="The rule holds.", rules=(rule,), report_hash=report.fingerprint()
    )


def add_releases(
    work: OpenProject,
    prepared: PreparedData,
    plan: Plan,
    newest: TrainOutcome,
    report: Report,
    verdict: Verdict,
) -> list[Release]:
    """Two releases; champion moved from the first to the second."""
    store, found = open_store(work), list[Release]()
    previous = write_adapter(work.project.runs / "earlier" / "adapter", 99)
    for adapter, when in ((previous, at(3.5)), (Path(newest.adapter_folder), at(5))):
        outcome = newest.model_copy(
            update={"adapter_folder": str(adapter), "adapter_hash": folder_digest(adapter)}
        )
        lineage = Lineage(
            dataset=prepared.dataset,
            plan=plan,
            outcome=outcome,
            report=report,
            verdict=verdict,
            measured_adapter=outcome.adapter_hash,
        )
        context = ReleaseContext(
            project=work.settings.project,
            base=plan.base,
            base_fingerprint=plan.base_fingerprint,
            template_fingerprint=prepared.dataset.template_fingerprint,
            parent=found[-1].id if found else None,
            created_at=when,
            settings={"train": plan.train},
            versions={"graftwork": "0"},
        )
        found.append(publish(store, work.releases, lineage=lineage, context=context, adapter_folder=adapter))
        work.releases.move_alias(
            AliasMove(
                alias="champion",
                release_id=found[-1].id,
                previous=found[-2].id if len(found) > 1 else None,
                who="ada",
                when=when,
                why="the gate said deploy",
            )
        )
    return found


def add_captures(work: OpenProject, released: Sequence[Release], *, count: int) -> None:
    chance = random.Random(3)
    found = []
    for number in range(count):
        question = f"Where is the moss number {number}?" + (f" {HOSTILE}" if number % 20 == 1 else "")
        found.append(
            Capture(
                id=f"{number:08x}" * 4,
                at=at(6 + 20 * number / count),
                session=f"chat-{number // 3}",
                model="champion",
                release=released[-1].id,
                request={"messages": [{"role": "user", "content": question}]},
                reply=f"By the wall. {HOSTILE}" if number % 20 == 1 else "By the wall.",
                finish_reason="length" if number % 19 == 7 else "stop",
                prompt_tokens=20,
                reply_tokens=6,
                first_token_ms=40 + 100 * chance.random(),
                total_ms=200 + 900 * chance.random(),
                escalated_from=released[0].id if number % 13 == 4 else None,
                failed_check="json_valid" if number % 13 == 4 else None,
                rejected="{" if number % 13 == 4 else None,
            )
        )
    work.captures.add(found)
    store = FeedbackStore(work.database, project=work.settings.project)
    for capture in found[:5]:
        store.add(Feedback(capture=capture.id, at=at(30), score=0.0, comment=HOSTILE, who="a user"))


def add_jobs(work: OpenProject, newest: TrainOutcome) -> None:
    began = START.timestamp()
    bill = MachineBill(created_at=began, last_seen=began + 1800, usd_per_hour=0.44)
    job = FleetJob(
        id="4f1c",
        label="graft-4f1c",
        place="runpod",
        run_id=newest.run_id,
        state="intended",
        bundle="bundle",
        created_at=began,
        updated_at=began + 1800,
        gpu="RTX A5000",
        seconds=3600,
        usd_per_hour=0.44,
        planned_usd=0.3,
        committed_usd=0.6,
    )
    work.jobs.reserve(job, work.settings.fleet.caps)
    work.jobs.update(job.model_copy(update={"state": "submitted"}))
    work.jobs.update(
        job.model_copy(update={"state": "done", "machines": {"pod-1": bill}, "committed_usd": 0.0})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--captures", type=int, default=80)
    asked = parser.parse_args()
    make_project(asked.folder, cases=asked.cases, runs=asked.runs, captures=asked.captures)
    print(f"graft ui -C {asked.folder}")


if __name__ == "__main__":
    main()
