"""Small samples: intervals and tests that hold their level, and how many cases decide.

In: counts, rates, measured numbers. Out: intervals and probabilities. Pure; does not know what was
counted. A report over a few hundred cases takes well under a second.
"""

from graftwork.evaluate.statistics import anytime
from graftwork.evaluate.statistics.bounded import (
    NonInferiority,
    Units,
    bounded_difference,
    bounded_mean,
    make_units,
    mean_above,
    mean_differs,
    non_inferior,
    paired_difference,
)
from graftwork.evaluate.statistics.intervals import (
    MOST_CASES,
    Interval,
    Sided,
    clopper_pearson,
    incomplete_beta,
)
from graftwork.evaluate.statistics.means import ClusteredMean, bootstrap_mean, clustered_mean, mean_difference
from graftwork.evaluate.statistics.significance import (
    USUAL_POWER,
    cases_for_difference,
    detectable_difference,
    holm,
    mcnemar,
    mcnemar_power,
    paired_permutation,
    successes_to_clear,
    units_for_power,
)

__all__ = [
    "MOST_CASES",
    "USUAL_POWER",
    "ClusteredMean",
    "Interval",
    "NonInferiority",
    "Sided",
    "Units",
    "anytime",
    "bootstrap_mean",
    "bounded_difference",
    "bounded_mean",
    "cases_for_difference",
    "clopper_pearson",
    "clustered_mean",
    "detectable_difference",
    "holm",
    "incomplete_beta",
    "make_units",
    "mcnemar",
    "mcnemar_power",
    "mean_above",
    "mean_difference",
    "mean_differs",
    "non_inferior",
    "paired_difference",
    "paired_permutation",
    "successes_to_clear",
    "units_for_power",
]
