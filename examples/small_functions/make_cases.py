"""Write the prompts to learn from (`learn.jsonl`), the cases that settings were chosen by (`develop.jsonl`)
and the held-out cases (`held_out.jsonl`).

Run it again after a change to the families: the same families give the same bytes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from develop_families import DEVELOP
from families import LEARNED, Family
from held_out_families import HELD_OUT
from more_families import LEARNED_TOO

ASK = """Write this Python function. Answer with code only.

def {name}({parameters}):
    # {sentence}
    # {example}"""


def make_cases(family_name: str, family: Family) -> Iterator[dict[str, object]]:
    for line in family.functions.strip().splitlines():
        name, sentence, expression = (part.strip() for part in line.split("|", 2))
        function = eval(f"lambda {family.parameters}: {expression}")
        shown, *tried = family.arguments
        values = [function(*given) for given in tried]
        if len({json.dumps(value) for value in values}) < 2:
            raise SystemExit(
                f"{family_name}/{name}: every call gives {values[0]!r}, so a constant would pass"
            )
        arguments = ", ".join(map(repr, shown))
        example = f"{name}({arguments}) == {function(*shown)!r}"
        yield {
            "id": f"{family_name}/{name}",
            "prompt": ASK.format(name=name, parameters=family.parameters, sentence=sentence, example=example),
            "reference": f"def {name}({family.parameters}):\n    return {expression}",
            "group": family_name,
            "checks": [
                {
                    "python_calls": [
                        {"call": name, "args": list(given), "gives": value}
                        for given, value in zip(tried, values, strict=True)
                    ]
                }
            ],
        }


def main() -> None:
    folder = Path(__file__).parent
    for file, families in (
        ("learn.jsonl", LEARNED | LEARNED_TOO),
        ("develop.jsonl", DEVELOP),
        ("held_out.jsonl", HELD_OUT),
    ):
        cases = [case for name, family in families.items() for case in make_cases(name, family)]
        (folder / file).write_text("".join(json.dumps(case) + "\n" for case in cases))
        print(f"{file}: {len(cases)} prompts of {len(families)} families")


if __name__ == "__main__":
    main()
