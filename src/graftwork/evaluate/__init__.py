"""Adapter and cases in, a report and a verdict out.

`cases` picks what is asked, `worker` asks it (the only file here that loads a model), `metrics`
grade one answer, `score` counts with exact intervals, `gate` decides by the project's rules.
"""
