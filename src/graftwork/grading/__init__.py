"""Answers graded: 1.0 right, 0.0 wrong, None if the question does not arise.

Input: a case, the text of an answer, a GradeContext. Output: a grade. Whether a metric applies depends on the
case alone, never on the answer, so that two subjects are graded on the same cases (except `reviewer_score`).

`interface` has the types, `metrics` every metric by name, `rules` those with parameters, `custom` the
project's custom functions, `code` tests in the sandbox; `checks` grades by name, `rewards` for training.
"""
