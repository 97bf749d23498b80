"""Writes the sessions that this example prepares: six agents that build a converter in four stages.

Every sentence comes from the tables below; the same seed writes the same file. Some sessions were
rejected by their reviewer, some hold a token that does not belong there, some ask what was asked
before.

    python make_log.py
"""

import json
import random
from pathlib import Path

AGENTS = {
    "federation": ("node", "peer list", "heartbeat", "route", "lease", "quorum"),
    "continuation": ("checkpoint", "journal", "snapshot", "resume point", "retry", "timer"),
    "resources": ("memory budget", "worker pool", "disk quota", "download", "cache", "queue"),
    "learning": ("corpus", "lesson", "score", "example", "curriculum", "review"),
    "interface": ("command", "prompt", "table", "help page", "progress bar", "shortcut"),
    "arbitration": ("vote", "claim", "ledger", "dispute", "fee", "signature"),
}
STAGES = {
    1: ("read a {} from a file", "check that a {} is whole", "write a {} whole", "count the parts of a {}"),
    2: (
        "convert a {} to JSON",
        "extract names from a {}",
        "merge two versions of a {}",
        "translate an old {}",
    ),
    3: ("cache a {} between calls", "stream a {} that is huge", "read a {} on all cores", "index a {}"),
    4: ("watch a {} for errors", "measure how long a {} takes", "warn when a {} grows", "retry a failed {}"),
}
FORMATS = (
    "plain text",
    "Markdown",
    "CSV",
    "XML",
    "a ZIP archive",
    "a mailbox",
    "a spreadsheet",
    "a web page",
)
SITUATIONS = (
    "The {thing} from {form} arrives twice within a second.",
    "Somebody asks for the {thing} of {form} while it is being written.",
    "The {thing} in {form} is three versions old.",
    "Half of the {thing} in {form} is missing.",
    "Two tools disagree about the {thing} in {form}.",
)
DECISIONS = (
    "Keep the first {thing}, note the second in the log and answer with the first.",
    "Answer with the last whole {thing} and say how old it is.",
    "Convert the {thing} step by step, and keep the original beside it.",
    "Refuse the {thing}, name what is missing, and leave the old one in place.",
    "Ask the owner of the {thing}, and stop until there is an answer.",
)
SESSIONS_PER_STAGE = 24
# Looks like a token of a code host and is none.
TOKEN = "ghp_" + "x7Kq2Vb9Lw4Rt8Zp1Nc6Md3Hs5Jf0Gy2Ta4E"


def make_session(number: int, agent: str, stage: int, chance: random.Random) -> dict[str, object]:
    things, form = AGENTS[agent], chance.choice(FORMATS)
    thing = chance.choice(things)
    task = chance.choice(STAGES[stage]).format(f"{thing} in {form}")
    name = "_".join(task.replace("JSON", "json").split()[:2])
    code = (
        f"def {name}(path: Path) -> {thing.title().replace(' ', '')}:\n"
        f'    """{task[0].upper()}{task[1:]}."""\n'
        f"    with path.open() as handle:\n"
        f"        return parse_{thing.replace(' ', '_')}(handle, stage={stage})\n"
    )
    place = chance.randrange(len(SITUATIONS))
    rejected = number % 17 == 5
    note = f" The key is {TOKEN}." if number % 41 == 7 else ""
    return {
        "session_id": f"s{number:04d}",
        "manager": agent,
        "domain": "conversion" if "convert" in task or "translate" in task else "operation",
        "stage": stage,
        "decisions": [
            {
                "situation": SITUATIONS[place].format(thing=thing, form=form) + " What do you do?",
                "decision": DECISIONS[place].format(thing=thing) + note,
            }
        ],
        "code_patterns": [{"task": f"Write a function to {task}.", "code": code, "language": "python"}],
        "reward_signals": {"atomicity": round(chance.uniform(0.5, 1), 2), "review": 0.0 if rejected else 1.0},
        "reviewer_feedback": {
            "reviewer": "architect",
            "verdict": "rejected" if rejected else "approved",
            "comment": "It does two things." if rejected else "Fine as it is.",
        },
    }


def main() -> None:
    chance = random.Random(7)
    plan = [(agent, stage) for agent in AGENTS for stage in STAGES for _ in range(SESSIONS_PER_STAGE)]
    chance.shuffle(plan)
    sessions = [make_session(number, agent, stage, chance) for number, (agent, stage) in enumerate(plan)]
    path = Path(__file__).parent / "logs" / "sessions.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))


if __name__ == "__main__":
    main()
