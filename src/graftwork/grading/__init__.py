"""One answer graded: 1.0 right, 0.0 wrong, None where the question does not arise.

In: a case, the text of an answer, the names of the fields. Out: a grade. Whether a metric applies
depends on the case alone, never on the answer, so that two subjects are graded on the same cases
(but for `reviewer_score`: nobody has read an answer that was never given before).

`table` names every metric, `checks` every rule with parameters, `grading` grades by name; one file a
kind besides.
"""
