"""Small samples: intervals and tests that hold their level, and how many cases decide.

In: counts, rates, measured numbers. Out: intervals and probabilities. Pure; does not know what was
counted. A report over a few hundred cases takes well under a second.
"""
