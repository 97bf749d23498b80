"""Invented records of a whole run, as the page gets them."""

import json
import math
import random
from collections import Counter

from graftwork.records.base import Figure
from graftwork.records.dataset import Audit, Dataset, Finding, InputFile, LengthSummary, SplitSummary
from graftwork.records.plan import DeviceFacts, Plan, Residual
from graftwork.records.release import Release, Tried
from graftwork.records.report import (
    Comparison,
    Generation,
    Metric,
    Report,
    RuleResult,
    SubjectReport,
    Verdict,
)
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.views.page import ReportPage


def digest(letter):
    return (letter * 3 + "91c04be27d5a") * 5


def make_audit():
    length = LengthSummary(smallest=80, median=420, p95=690, largest=1200)

    def finding(code, severity, count, title, effect, fix):
        return Finding(code=code, severity=severity, count=count, title=title, effect=effect, fix=fix)

    return Audit(
        files=("logs/answers.jsonl",),
        rows=1012,
        readable=1009,
        usable=861,
        fit_to_train=True,
        findings=(
            finding(
                "duplicate",
                "warning",
                64,
                "Exact duplicates",
                "The model learns these by heart and the test split leaks.",
                "data.deduplicate: exact",
            ),
            finding(
                "secret",
                "blocker",
                1,
                "A secret in a row",
                "The adapter could repeat a live key.",
                "data.redact: true",
            ),
            finding(
                "failed",
                "warning",
                38,
                "Failed or placeholder replies",
                "The model learns to apologise.",
                "data.keep_status: [ok]",
            ),
            finding(
                "truncated",
                "warning",
                22,
                "Replies cut off",
                "The model learns to stop in the middle of an object.",
                "data.drop_truncated: true",
            ),
            finding(
                "near", "info", 27, "Questions asked again in other words", "Kept in one split.", "nothing"
            ),
        ),
        groups={"hours": 400, "recipes": 300},
        prompt_length=length,
        reply_length=length,
    )


def make_dataset(draw):
    def lengths(n):
        return tuple(int(min(max(draw.gauss(205, 38), 96), 356)) for _ in range(n))

    split = {"train": lengths(610), "validation": lengths(60), "test": lengths(160)}
    return Dataset(
        content_hash=digest("d"),
        base="smollm2-135m-instruct",
        base_fingerprint=digest("b"),
        template_fingerprint=digest("t"),
        tokenizer_fingerprint=digest("k"),
        inputs=(InputFile(file="logs/answers.jsonl", sha256=digest("i"), rows=1012),),
        splits={
            name: SplitSummary(
                rows=len(v), groups=4, tokens=sum(v), trained_tokens=1, longest=max(v), lengths=Counter(v)
            )
            for name, v in split.items()
        },
        kept_after={
            "read": 1009,
            "status": 971,
            "whole replies": 949,
            "exact duplicates": 885,
            "near duplicates": 830,
        },
        redactions={"api key": 1, "email": 12},
        settings={},
    )


def make_plan():
    return Plan(
        base="smollm2-135m-instruct",
        base_fingerprint=digest("b"),
        dataset_hash=digest("d"),
        method="LoRA",
        dtype="float32",
        device=DeviceFacts(kind="cpu", name="2 CPU threads", memory_gib=7.8, threads=2),
        certainty="probed",
        total_parameters=Figure.exact(134_515_008),
        trainable_parameters=Figure.exact(2_442_240),
        peak_memory_gib=Figure.about(1.9, down=0.8, up=1.25, unit="GiB"),
        disk_gib=Figure.exact(0.1, "GiB"),
        tokens=Figure.exact(98_304),
        trained_tokens=Figure.exact(18_000),
        steps=Figure.exact(64),
        tokens_per_second=Figure.about(520, down=0.7, up=1.3, unit="tokens/s"),
        minutes=Figure.about(3.2, down=0.75, up=1.4, unit="min"),
        fits=True,
        train={},
    )


def make_outcome(plan):
    return TrainOutcome(
        run_id="run-20250301-4c1f",
        adapter_folder="adapter",
        adapter_hash=digest("a"),
        base_hash_before=digest("b"),
        base_hash_after=digest("b"),
        steps=64,
        epochs=1.6,
        first_loss=2.31,
        final_loss=0.41,
        validation_loss_before=2.28,
        validation_loss_after=0.46,
        seconds=224.0,
        load_seconds=2.1,
        tokens_per_second=446.0,
        peak_memory_gib=2.05,
        trainable_parameters=2_442_240,
        restarts=1,
        replayed_steps=7,
        replay_identical=True,
        residuals=(
            Residual(name="minutes", planned=plan.minutes, actual=3.73),
            Residual(name="peak memory", planned=plan.peak_memory_gib, actual=2.05),
            Residual(name="tokens per second", planned=plan.tokens_per_second, actual=446.0),
            Residual(name="steps", planned=plan.steps, actual=64),
            Residual(name="disk", planned=Figure.about(0.1, down=0.9, up=1.1, unit="GiB"), actual=0.131),
        ),
        versions={"torch": "2.13.0", "transformers": "5.22.2", "graftwork": "0.1.0"},
    )


def make_steps(draw):
    def step(i):
        loss = 0.38 + 1.95 * math.exp(-i / 13) + draw.gauss(0, 0.07)
        return TrainStep(
            step=i,
            loss=max(loss, 0.05),
            learning_rate=1e-3,
            gradient_norm=1,
            tokens=1536,
            trained_tokens=280,
            seconds=3.4,
        )

    once = {i: step(i) for i in range(1, 65)}
    return tuple(once[i] for i in (*range(1, 28), *range(21, 65)))


def rate(name, successes, n, low, high):
    return Metric(name=name, kind="rate", value=successes / n, low=low, high=high, n=n, successes=successes)


def figure(name, value, low, high, n, unit):
    return Metric(name=name, kind="number", value=value, low=low, high=high, n=n, unit=unit)


def make_subject(subject, metrics, latency):
    generation = Generation(
        subject=subject,
        answers=160,
        seconds=61,
        tokens_per_second=113,
        single_latency_seconds=latency,
        peak_memory_gib=0.9,
        settings={"worked_example": subject == "base"},
    )
    return SubjectReport(subject=subject, metrics={m.name: m for m in metrics}, generation=generation)


def make_report():
    before = [
        rate("json_valid", 71, 160, 0.365, 0.524),
        rate("citation_coverage", 38, 122, 0.231, 0.402),
        rate("refusal_correct", 52, 160, 0.253, 0.404),
        rate("citation_correct", 30, 122, 0.172, 0.332),
        rate("truncated", 61, 160, 0.306, 0.461),
        figure("latency_seconds", 2.91, 2.4, 3.3, 8, "s"),
        figure("peak_memory_gib", 0.94, 0.94, 0.94, 1, "GiB"),
    ]
    after = [
        rate("json_valid", 159, 160, 0.9657, 0.9998),
        rate("citation_coverage", 116, 122, 0.896, 0.982),
        rate("refusal_correct", 146, 160, 0.858, 0.951),
        rate("citation_correct", 101, 122, 0.749, 0.890),
        rate("truncated", 1, 160, 0.0002, 0.0343),
        figure("latency_seconds", 1.62, 1.4, 1.8, 8, "s"),
        figure("peak_memory_gib", 0.96, 0.96, 0.96, 1, "GiB"),
    ]

    def pair(metric, n, wins, losses, difference, low, high, p):
        return Comparison(
            metric=metric,
            baseline="base",
            candidate="adapter",
            n=n,
            wins=wins,
            losses=losses,
            difference=difference,
            low=low,
            high=high,
            p_value=p,
        )

    return Report(
        cases_hash=digest("c"),
        cases=160,
        baseline=make_subject("base", before, (2.9,) * 8),
        candidate=make_subject("adapter", after, (1.6,) * 8),
        comparisons=(
            pair("json_valid", 160, 89, 1, 0.55, 0.47, 0.63, 1e-20),
            pair("citation_coverage", 122, 80, 2, 0.639, 0.54, 0.72, 1e-18),
            pair("refusal_correct", 160, 99, 5, 0.5875, 0.5, 0.67, 1e-19),
            pair("citation_correct", 122, 75, 4, 0.582, 0.48, 0.67, 1e-15),
            pair("truncated", 160, 60, 0, -0.375, -0.45, -0.3, 1e-15),
            pair("latency_seconds", 8, 8, 0, -1.24, -1.5, -0.9, 0.0078),
        ),
    )


def make_verdict():
    def rule(metric, text, outcome, value, low, high, limit, sentence):
        return RuleResult(
            metric=metric,
            rule=text,
            outcome=outcome,
            value=value,
            low=low,
            high=high,
            limit=limit,
            sentence=sentence,
        )

    return Verdict(
        decision="deploy",
        reason="All 5 rules hold.",
        rules=(
            rule(
                "json_valid",
                "JSON-valid rate over 95 %",
                "pass",
                0.994,
                0.9657,
                0.9998,
                0.95,
                "JSON-valid rate: 159 of 160 (99.4 %); the lower bound 96.6 % is over 95 %.",
            ),
            rule(
                "citation_coverage",
                "Citation coverage over 85 %",
                "pass",
                0.951,
                0.896,
                0.982,
                0.85,
                "Citation coverage: 116 of 122 (95.1 %); the lower bound 89.6 % is over 85 %.",
            ),
            rule(
                "refusal_correct",
                "Refusal correctness over 80 %",
                "pass",
                0.9125,
                0.858,
                0.951,
                0.8,
                "Refusal correctness: 146 of 160 (91.3 %); the lower bound 85.8 % is over 80 %.",
            ),
            rule(
                "latency_seconds",
                "Latency under 4 s",
                "pass",
                1.62,
                1.4,
                1.8,
                4.0,
                "Latency: 1.62 s; the upper bound 1.80 s is under 4 s.",
            ),
            rule(
                "peak_memory_gib",
                "Peak memory under 2 GiB",
                "pass",
                0.96,
                0.96,
                0.96,
                2.0,
                "Peak memory: 0.96 GiB; that is under 2 GiB.",
            ),
        ),
        report_hash=digest("r"),
    )


def make_release():
    return Release(
        id="4c1f9be27d5a03aa",
        project="cited_answers",
        base="smollm2-135m-instruct",
        base_fingerprint=digest("b"),
        template_fingerprint=digest("t"),
        adapter_hash=digest("a"),
        dataset_hash=digest("d"),
        plan_hash=digest("p"),
        report_hash=digest("r"),
        verdict_hash=digest("v"),
        decision="deploy",
        run_id="run-20250301-4c1f",
        parent=None,
        created_at="2025-03-01T10:22:41Z",
        files=(),
        settings={},
        versions={},
    )


def make_answers():
    def reply(answer, citations, refused):
        return json.dumps({"answer": answer, "citations": citations, "refused": refused})

    asked = {"case_id": "", "capture_id": "", "captured_reply": "", "seconds": 0.0}
    asked["answered_by"] = "4c1f9be27d5a03aa"
    return (
        Tried(
            question="From when on is the bakery's oven hot on Sundays?",
            base_answer="The oven is hot from 6:00 AM on Sundays. According to source [2], the bakery",
            release_answer=reply("From five in the morning.", [2], False),
            reference=reply("From five in the morning.", [2], False),
            **asked,
        ),
        Tried(
            question="Who painted the mural in the waiting hall?",
            base_answer=reply("The mural was painted by the harbour master.", [1, 3], False),
            release_answer=reply("", [], True),
            reference=reply("", [], True),
            **asked,
        ),
        Tried(
            question="How many crates does the lift carry at once?",
            base_answer=reply("It carries crates.", [1], False),
            release_answer=reply("Eleven crates.", [1], False),
            reference=reply("Twelve crates, if they are empty.", [1, 2], False),
            **asked,
        ),
    )


def make_page(**changes):
    draw = random.Random(7)
    plan = make_plan()
    values = {
        "project": "cited_answers",
        "audit": make_audit(),
        "dataset": make_dataset(draw),
        "plan": plan,
        "steps": make_steps(draw),
        "outcome": make_outcome(plan),
        "report": make_report(),
        "verdict": make_verdict(),
        "release": make_release(),
        "side_by_side": make_answers(),
        "seconds": {
            "audit": 0.6,
            "prepare": 2.4,
            "plan": 0.04,
            "train": 231.0,
            "evaluate": 142.0,
            "gate": 0.02,
            "release": 0.3,
            "try": 11.8,
        },
    }
    return ReportPage(**{**values, **changes})
