"""Deploy, iterate, abort, or not enough evidence.

`settings` reads the rules, `figures` measures, `rules` compares and judges one rule each (limits, margins,
gains), `decide` makes the verdict and chooses the next session's start, `advice` says what to try, `project`
knows the champion and keeps verdicts, `family` judges a whole family through its endpoint.
"""
