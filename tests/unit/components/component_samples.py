"""A small plan and stand-ins for a model and a verifier, shared by the tests of generation."""

from graftwork.components.cases import CallCase, ComponentCases, PropertyCase
from graftwork.components.plan import Component, ComponentPlan
from graftwork.components.verifier import Evidence, MutationScore, SourceFacts, SourceVerdict, case_ids
from graftwork.engines.interface import EngineReply
from graftwork.process.sandbox import Limits, Sandbox, available
from graftwork.records.base import fingerprint

DOUBLE = Component(
    id="1.1",
    name="Double",
    module="double",
    function="double",
    description="Twice the number",
    parameters=(("number", "integer"),),
    outputs=(("twice", "integer"),),
    cases=ComponentCases(
        calls=(
            CallCase(args=(1,), gives=2),
            CallCase(args=(5,), gives=10),
            CallCase(args=(0,), gives=0, stage=2),
            CallCase(args=("a",), raises="TypeError", stage=4),
        ),
        properties=(PropertyCase(name="even", holds="result % 2 == 0"),),
    ),
)
QUADRUPLE = Component(
    id="1.2",
    name="Quadruple",
    module="quadruple",
    function="quadruple",
    parameters=(("number", "integer"),),
    outputs=(("result", "integer"),),
    dependencies=("1.1",),
    cases=ComponentCases(calls=(CallCase(args=(1,), gives=4), CallCase(args=(3,), gives=12))),
)
PLAN = ComponentPlan(package="numbers_demo", components=(DOUBLE, QUADRUPLE), spec_hash="spec")
GOOD = 'def double(number: int) -> int:\n    """Twice."""\n    return number + number\n'
GUARDED = (
    'def double(number: int) -> int:\n    """Twice."""\n    if not isinstance(number, int):\n'
    '        raise TypeError("no number")\n    return number + number\n'
)
USES = (
    "from numbers_demo.double import double\n\n\n"
    'def quadruple(number: int) -> int:\n    """Four times."""\n    return double(double(number))\n'
)


def patient_sandbox() -> Sandbox:
    return Sandbox(available(), Limits(wall_seconds=120, cpu_seconds=120))


class Prose(str):
    """An answer without a code block."""


class ScriptedModel:
    """Answers by component and stage; counts how often it was asked."""

    label, identity, at_once = "scripted", "model-hash", 1

    def __init__(self, answers):
        self._answers = answers
        self.asked = []

    def give_up(self):
        """Nothing is on its way."""

    def ask(self, messages, decoding):
        heading = messages[-1].content.splitlines()[0]
        _, component, stage = heading.removeprefix("Component ").split(" · ")
        key = (heading.split()[1], int(stage.removeprefix("stage ")))
        self.asked.append((*key, decoding.seed))
        texts = self._answers.get(key, ["I cannot write this."])
        text = texts[(decoding.seed or 0) % len(texts)]
        if isinstance(text, Exception):
            raise text
        shown = f"```\n{text}```" if component and text and not isinstance(text, Prose) else text
        return EngineReply(shown, tokens=10, prompt_tokens=20, finish_reason="stop")


class TrustingVerifier:
    """Accepts every source that contains `return`; notes what it was given."""

    def __init__(self, noted=None):
        self.noted = noted if noted is not None else []

    def verify(self, submissions):
        self.noted += [fingerprint([each.source, each.stage, each.component.id]) for each in submissions]
        return [self._verdict(each) for each in submissions]

    def _verdict(self, given):
        ok = "return" in given.source
        cases = dict.fromkeys(case_ids(given.component, given.stage), "" if ok else "no")
        facts = SourceFacts(defines=ok, public=(given.component.function,))
        return SourceVerdict(ok=ok, reason="" if ok else "no", cases=cases, facts=facts, values="same")

    def measure(self, submissions):
        return [Evidence(events=len(each.source), peak_bytes=1, ran=1, executable=1) for each in submissions]

    def mutate(self, submissions):
        return [MutationScore(mutants=2, killed=2) for _ in submissions]
