"""Small samples: intervals and tests that hold their level, and how many cases decide.

In: counts, rates, measured numbers. Out: intervals and probabilities. Pure; does not know what was
counted. A report over a few hundred cases takes well under a second.
"""

from graftwork.evaluate.statistics import anytime
from graftwork.evaluate.statistics.beta import incomplete_beta
from graftwork.evaluate.statistics.bootstrap import bootstrap_mean
from graftwork.evaluate.statistics.bounded import (
    Units,
    bounded_difference,
    bounded_mean,
    make_units,
    mean_above,
    mean_differs,
    paired_difference,
)
from graftwork.evaluate.statistics.clustered import ClusteredMean, clustered_mean, mean_difference
from graftwork.evaluate.statistics.intervals import Interval, Sided, clopper_pearson
from graftwork.evaluate.statistics.margins import NonInferiority, non_inferior
from graftwork.evaluate.statistics.multiple import holm
from graftwork.evaluate.statistics.paired import mcnemar
from graftwork.evaluate.statistics.permutation import paired_permutation
from graftwork.evaluate.statistics.power import (
    USUAL_POWER,
    cases_for_difference,
    detectable_difference,
    mcnemar_power,
    successes_to_clear,
    units_for_power,
)
from graftwork.evaluate.statistics.search import MOST_CASES

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
