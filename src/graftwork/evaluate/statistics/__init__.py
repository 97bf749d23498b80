"""Small samples told straight: exact intervals, exact paired tests, and how many cases decide.

In: counts, rates, measured numbers. Out: intervals and probabilities. Pure; does not know what was
counted. Everything here is plain Python: a report over a few hundred cases takes well under a second.
"""

from graftwork.evaluate.statistics import anytime
from graftwork.evaluate.statistics.beta import incomplete_beta
from graftwork.evaluate.statistics.bootstrap import bootstrap_mean, studentised_mean
from graftwork.evaluate.statistics.clustered import (
    ClusteredMean,
    clustered_difference,
    clustered_mean,
    clustered_rate,
    mean_difference,
)
from graftwork.evaluate.statistics.intervals import Interval, Sided, clopper_pearson
from graftwork.evaluate.statistics.margins import NonInferiority, non_inferior, pairs_for_margin
from graftwork.evaluate.statistics.multiple import holm
from graftwork.evaluate.statistics.paired import mcnemar, paired_difference
from graftwork.evaluate.statistics.permutation import paired_permutation
from graftwork.evaluate.statistics.power import (
    cases_for_difference,
    cases_to_decide,
    detectable_difference,
    mcnemar_power,
    pairs_to_decide,
    successes_to_clear,
)
from graftwork.evaluate.statistics.search import MOST_CASES

__all__ = [
    "MOST_CASES",
    "ClusteredMean",
    "Interval",
    "NonInferiority",
    "Sided",
    "anytime",
    "bootstrap_mean",
    "cases_for_difference",
    "cases_to_decide",
    "clopper_pearson",
    "clustered_difference",
    "clustered_mean",
    "clustered_rate",
    "detectable_difference",
    "holm",
    "incomplete_beta",
    "mcnemar",
    "mcnemar_power",
    "mean_difference",
    "non_inferior",
    "paired_difference",
    "paired_permutation",
    "pairs_for_margin",
    "pairs_to_decide",
    "studentised_mean",
    "successes_to_clear",
]
