"""Ship it or not: deploy, iterate, abort, or not enough evidence.

In: a report and the rules of graft.yaml. Out: a verdict. `decide` puts it together; each kind of rule stands
in a file of its own: `judge` (limits, invariants), `guardrails` (margins), `wins` (the primary metric, a
declared saving), `losses` (what aborts). `sessions` decides between training sessions of one model.
"""

from graftwork.evaluate.gate.advice import Training
from graftwork.evaluate.gate.decide import STATISTICS, Judged, decide, decide_all, next_start
from graftwork.evaluate.gate.pairs import Surroundings
from graftwork.evaluate.gate.rules import judge_rule

__all__ = [
    "STATISTICS",
    "Judged",
    "Surroundings",
    "Training",
    "decide",
    "decide_all",
    "judge_rule",
    "next_start",
]
