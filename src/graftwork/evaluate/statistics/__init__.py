"""Small samples: intervals and tests that hold their level, and how many cases decide.

Input: counts, rates, measured numbers. Output: intervals and probabilities. Pure; does not know what was
counted. A report over a few hundred cases takes well under a second.
"""
