"""How often a simulated canary is decided rightly: worse, better, equal, and failing releases.

Run: python benchmarks/canary.py [--runs 1000] [--sessions 20000] [--power]. Sessions are assigned at random
with the share of the canary; each is right with the rate of its release. The rule is the one of
`graft release promote --canary`, looked at after every session. Seeded: the same figures every time.
"""

import argparse
import json
import math
import random
import statistics
from typing import NamedTuple

from results import save_results

from graftwork.evaluate.ab import CanaryTest, LiveAnswer

CHAMPION = 0.80


class Scenario(NamedTuple):
    name: str
    rate: float
    failing: float
    expected: str


SCENARIOS = (
    Scenario("20 points worse", 0.60, 0.0, "roll_back"),
    Scenario("10 points worse", 0.70, 0.0, "roll_back"),
    Scenario("5 % of requests fail", 0.80, 0.05, "roll_back"),
    Scenario("10 points better", 0.90, 0.0, "promote"),
    Scenario("5 points better", 0.85, 0.0, "promote"),
    Scenario("equal", 0.80, 0.0, "wait"),
)


def run_one(scenario: Scenario, *, seed: int, share: float, sessions: int) -> tuple[str, int]:
    """The decision, and after how many sessions."""
    chance, test = random.Random(f"{scenario.name} {seed}"), CanaryTest()
    for number in range(1, sessions + 1):
        arm = "B" if chance.random() < share else "A"
        failed = arm == "B" and chance.random() < scenario.failing
        good = not failed and chance.random() < (scenario.rate if arm == "B" else CHAMPION)
        step = test.take(LiveAnswer(arm, None, float(good)), failed=failed)
        if step != "wait":
            return step, number
    return "wait", sessions


GAINS = (0.05, 0.10, 0.15)
SHARES = (0.05, 0.10, 0.25, 0.50)
POWERS = (0.5, 0.8, 0.95)
MOST_SESSIONS = 400_000


def measure_power(runs: int) -> list[dict[str, float | int | str | None]]:
    """Sessions after which a share of the canaries that are better has been promoted."""
    found: list[dict[str, float | int | str | None]] = []
    for gain in GAINS:
        for share in SHARES:
            scenario = Scenario(f"{100 * gain:.0f} points better", CHAMPION + gain, 0.0, "promote")
            ends = [run_one(scenario, seed=seed, share=share, sessions=MOST_SESSIONS) for seed in range(runs)]
            promoted = sorted(number for step, number in ends if step == "promote")
            needed: dict[str, float | int | str | None] = {"gain": gain, "share": share}
            for power in POWERS:
                place = math.ceil(power * runs) - 1
                needed[f"sessions_for_{100 * power:.0f}_percent"] = (
                    promoted[place] if place < len(promoted) else None
                )
            needed["promoted"] = len(promoted) / runs
            print(json.dumps(needed), flush=True)
            found.append(needed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--power", action="store_true", help="Instead: how many sessions are needed.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.05)
    asked = parser.parse_args()
    if asked.power:
        made = {"runs": asked.runs, "champion": CHAMPION, "needed": measure_power(asked.runs)}
        print(save_results("canary_power", made))
        return
    figures = {}
    for scenario in SCENARIOS:
        found = [
            run_one(scenario, seed=seed, share=asked.share, sessions=asked.sessions)
            for seed in range(asked.runs)
        ]
        decided = [number for step, number in found if step != "wait"]
        figures[scenario.name] = {
            "rolled_back": sum(step == "roll_back" for step, _ in found) / asked.runs,
            "promoted": sum(step == "promote" for step, _ in found) / asked.runs,
            "undecided": sum(step == "wait" for step, _ in found) / asked.runs,
            "wrong": sum(step not in (scenario.expected, "wait") for step, _ in found) / asked.runs,
            "median_sessions": statistics.median(decided) if decided else None,
            "median_canary_sessions": asked.share * statistics.median(decided) if decided else None,
        }
        print(f"{scenario.name:22} {json.dumps(figures[scenario.name])}", flush=True)
    settings = {"runs": asked.runs, "sessions": asked.sessions, "share": asked.share, "champion": CHAMPION}
    print(save_results("canary", {"settings": settings, "scenarios": figures}))


if __name__ == "__main__":
    main()
