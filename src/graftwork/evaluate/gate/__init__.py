"""Ship it or not: deploy, iterate, abort, or not enough evidence.

In: a report and the rules of graft.yaml. Out: a verdict. `decide` puts it together; each kind of rule stands
in a file of its own: `judge` (limits, invariants), `guardrails` (margins), `wins` (the primary metric, a
declared saving), `losses` (what aborts). `sessions` decides between training sessions of one model.
"""
