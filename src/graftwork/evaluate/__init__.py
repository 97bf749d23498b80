"""Adapter and cases in, a report and a verdict out.

`cases` chooses what is asked, `subjects` who, `ask` asks and keeps answers, `report` counts with exact
intervals and compares, `gate` decides by the project's rules. Grades come from `grading`, answers
from `engines`.
"""
