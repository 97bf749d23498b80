"""How long a step takes, on a card or a processor, in our way or in that of transformers and PEFT. Pure.

In: a decoder's shape, how a step is set, what the hardware reaches. Out: seconds by parts. The door to
`plan/timing/`; knows nothing of clocks.
"""

from graftwork.plan.timing.card import card_seconds_a_token, card_step
from graftwork.plan.timing.links import link_seconds
from graftwork.plan.timing.plain import plain_step
from graftwork.plan.timing.probed import cpu_of_probe, rates_of_probe
from graftwork.plan.timing.processor import processor_step
from graftwork.plan.timing.rates import Rates, rates_of
from graftwork.plan.timing.roofline import Roof, is_possible, least_seconds

__all__ = [
    "Rates",
    "Roof",
    "card_seconds_a_token",
    "card_step",
    "cpu_of_probe",
    "is_possible",
    "least_seconds",
    "link_seconds",
    "plain_step",
    "processor_step",
    "rates_of",
    "rates_of_probe",
]
