"""Step: deploy, iterate or abort, by the rules in graft.yaml."""

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.evaluate import Evaluated
from graftwork.coordinate.workplace import Workplace
from graftwork.evaluate.gate import decide
from graftwork.records.verdict import Verdict


def _do(work: Workplace, made: Made) -> Verdict:
    return decide(made.get("evaluate", Evaluated).report, work.settings.gate)


STEP = Step(
    name="gate",
    title="decide by the rules",
    needs=("evaluate",),
    makes=Verdict,
    depends_on=lambda work, _made: work.settings.gate.model_dump(mode="json"),
    do=_do,
)
