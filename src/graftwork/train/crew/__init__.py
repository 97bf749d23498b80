"""Who works together on a step: alone, or several processes that share its rows. One file a strategy."""

from graftwork.train.crew.alone import Alone
from graftwork.train.crew.crew import Crew

__all__ = ["Alone", "Crew"]
