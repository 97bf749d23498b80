"""Deploy, iterate, abort, or not enough evidence.

`settings` reads the rules, `figures` and `pairs` measure, `rules` judges one rule each (limits, margins,
gains), `decide` makes the verdict and chooses the next session's start, `advice` says what to try,
`wording` writes it.
"""
