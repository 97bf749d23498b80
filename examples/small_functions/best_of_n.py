"""Write `logs/verified.jsonl`: of several answers of the base to each prompt, those that pass its calls.

Run: python best_of_n.py [--answers 8]. Takes about 17 minutes on one core; the file in this folder is its
output. Only the first function of an answer is kept, without the text around it.
"""

import argparse
import json
import re
from pathlib import Path

from graftwork.evaluate.cases import read_case_file
from graftwork.grading.rewards import RewardQuestion, RewardRunner, RewardSpec
from graftwork.grading.settings import RewardSettings
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.load import load_base
from graftwork.train.rollouts.sampling import AskedPrompt, RolloutSampler
from graftwork.train.settings import RolloutSettings

FOLDER = Path(__file__).parent
AT_ONCE = 8
DIFFERENT = 2
"""Verified answers that are kept for a prompt, the shortest first."""
_FUNCTION = re.compile(r"^def \w+\(.*?(?=^\S|\Z)", re.M | re.S)


def first_function(text: str) -> str:
    found = _FUNCTION.search(text)
    return found[0].rstrip() if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=8)
    asked = parser.parse_args()
    cases = {case.id: case for case in read_case_file(FOLDER / "learn.jsonl")}
    base = Path(find_base(EMBEDDED, project_folder=FOLDER).folder)
    template = ChatTemplate.from_folder(base)
    sampler = RolloutSampler(
        load_base(base, dtype="float32", device="cpu"),
        settings=RolloutSettings(max_completion_length=40, num_generations=asked.answers),
        seed=1,
        end_of_turn=template.eos,
        decode=template.decode,
    )
    names = list(cases)
    answers = []
    for at in range(0, len(names), AT_ONCE):
        prompts = [
            AskedPrompt(name, template.prompt(cases[name].messages)) for name in names[at : at + AT_ONCE]
        ]
        answers += [(answer.prompt, first_function(answer.text)) for answer in sampler.sample(1, prompts)]
    spec = RewardSpec(parts=(RewardSettings(metric="task_success"),), folder=str(FOLDER))
    with RewardRunner(spec) as runner:
        questions = [RewardQuestion(str(at), cases[name], text) for at, (name, text) in enumerate(answers)]
        passed = [
            answer for answer, found in zip(answers, runner.grade_all(questions), strict=True) if found.reward
        ]
    write_log(passed, {name: case.messages[-1].content for name, case in cases.items()})


def write_log(passed: list[tuple[str, str]], asked: dict[str, str]) -> None:
    kept: dict[str, list[str]] = {}
    for name, text in sorted(set(passed), key=lambda item: (item[0], len(item[1]), item[1])):
        kept.setdefault(name, []).append(text)
    lines = [
        {
            "id": f"{name}#{number}",
            "messages": [{"role": "user", "content": asked[name]}, {"role": "assistant", "content": text}],
        }
        for name, texts in kept.items()
        for number, text in enumerate(texts[:DIFFERENT])
    ]
    path = FOLDER / "logs" / "verified.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} verified answers to {len(kept)} of {len(asked)} prompts")


if __name__ == "__main__":
    main()
