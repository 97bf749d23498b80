"""Draws the stored reports of `verdicts/`: run it to draw them again, which changes every verdict.

`python tests/golden/verdict_reports.py`, with tests/unit/evaluate on the path.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "unit" / "evaluate"))

from gate_samples import report, subject  # noqa: E402

STORED = HERE / "verdicts" / "reports.jsonl"
REPORTS = 120
RATES = ("json_valid", "refusal_correct", "citation_correct")
SCORES = ("chrf",)
SIZES = (5, 8, 12, 20, 32, 40)


def draw_marks(chance, n, *, rate, kind, unfit=0.0):
    def mark():
        if chance.random() < unfit:
            return None
        if kind == "rate":
            return float(chance.random() < rate)
        return round(min(1.0, max(0.0, chance.gauss(rate, 0.15))), 2)

    return [mark() for _ in range(n)]


def draw_subject(chance, name, n, *, level, sessions, scale, timed):
    unfit = chance.choice([0.0, 0.0, 0.3])
    grades = {
        metric: draw_marks(chance, n, rate=min(1.0, level + chance.uniform(-0.1, 0.1)), kind="rate")
        for metric in RATES
    }
    grades["citation_correct"] = draw_marks(chance, n, rate=level, kind="rate", unfit=unfit)
    grades |= {metric: draw_marks(chance, n, rate=level, kind="score") for metric in SCORES}
    seconds = [round(scale * chance.uniform(0.5, 1.5), 3) for _ in range(8 if timed else 0)]
    return subject(name, grades, latency=seconds, memory=scale, sessions=sessions)


def draw_settings(chance, champion, *, generous):
    limit = 0.6 if generous else chance.choice([0.6, 0.8, 0.95])
    rules = [
        {"metric": chance.choice(RATES), chance.choice(["over", "at_least"]): limit},
        {"metric": "json_valid", "margin": chance.choice([0.02, 0.1, 0.3])},
    ]
    if chance.random() < 0.4:
        rules.append({"metric": "latency_seconds", "under": chance.choice([0.5, 1.0, 3.0])})
    if chance.random() < 0.3:
        rules.append({"metric": "refusal_correct", "over": 0.3, "severity": "invariant"})
    if champion:
        rules[1]["against"] = "champion"
    settings = {"rules": rules}
    primary = chance.choice([None, "none", "json_valid", "chrf", "citation_correct"])
    if primary is not None:
        settings["primary"] = primary
    if chance.random() < 0.25:
        settings["win"] = {"metric": "latency_seconds", "by": chance.choice([0.0, 0.2])}
    if chance.random() < 0.2:
        by = chance.choice(["interval", "value"])
        settings["abort_when"] = {"worse_on": ["json_valid", "refusal_correct"], "by": by}
    return settings


def draw(seed):
    chance = random.Random(seed)
    generous = seed % 4 == 0
    n = SIZES[-1] if generous else chance.choice(SIZES)
    sessions = {f"c{i}": f"s{i // 3}" for i in range(n)} if chance.random() < 0.3 else None
    level = 0.3 if generous else chance.uniform(0.2, 0.9)
    better = 0.8 if generous else chance.choice([-0.6, -0.2, 0.0, 0.1, 0.4, 0.7])
    timed = chance.random() < 0.6
    common = {"sessions": sessions, "timed": timed}
    base = draw_subject(chance, "base", n, level=level, scale=2.0, **common)
    candidate = draw_subject(
        chance, "adapter", n, level=min(1.0, max(0.0, level + better)), scale=1.0, **common
    )
    champion = chance.random() < 0.3
    others = [draw_subject(chance, "old", n, level=level, scale=1.5, **common)] if champion else []
    drawn = report(
        candidate,
        base,
        others=others,
        champion="old" if champion else None,
        sessions=sessions,
        groups={f"c{i}": ("desk", "shop")[i % 2] for i in range(n)},
        looks=chance.choice([1, 1, 1, 3]),
        settings={"confidence": chance.choice([0.9, 0.95])} if chance.random() < 0.3 else None,
    )
    around = {"tried": chance.choice([1, 1, 3]), "no_champion": not champion}
    if chance.random() < 0.1:
        around["doubts"] = {"chrf": "no one has labelled answers"}
    return {
        "report": drawn.model_dump(mode="json", exclude_defaults=True),
        "settings": draw_settings(chance, champion or chance.random() < 0.2, generous=generous),
        "around": around,
    }


def main():
    lines = (json.dumps(draw(seed), sort_keys=True, separators=(",", ":")) for seed in range(REPORTS))
    STORED.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
