"""Who answers a session that takes part in an experiment: drawn by lot, and the same every time.

In: the settings of the split, where the aliases point, the name of a session. Out: the arm. The lot is a
keyed hash of the session alone, so it knows nothing of what is asked, holds on every endpoint of the project
and after a restart. The key is made of the experiment's name, both releases and the share: change one of
them, and it is a new experiment that deals anew. Pure.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from graftwork.records.base import fingerprint
from graftwork.records.interaction import Arm
from graftwork.serve.settings import SplitSettings

_LOT_BYTES = 8
_SHOWN = 12
"""Characters of a release's id, as everywhere where one is shown."""


class Lot(NamedTuple):
    """What was drawn for one exchange: by which experiment, and what share the challenger has in it."""

    experiment: str
    arm: Arm
    share: float


@dataclass(frozen=True, slots=True)
class Deal:
    """An experiment under way: both releases are loaded."""

    experiment: str
    alias: str
    champion: str
    challenger: str
    share: float
    key: bytes
    bound: int
    """Lots below it are the challenger's."""

    def draw(self, session: str) -> Arm:
        data = session.encode(errors="surrogatepass")
        lot = hashlib.blake2b(data, key=self.key, digest_size=_LOT_BYTES).digest()
        return "challenger" if int.from_bytes(lot) < self.bound else "champion"

    def release_of(self, arm: Arm) -> str:
        return self.challenger if arm == "challenger" else self.champion


@dataclass(frozen=True, slots=True)
class NoDeal:
    """A split is set and cannot be: the champion answers all."""

    why: str


def make_deal(split: SplitSettings, *, champion: str, challenger: str) -> Deal:
    identity = fingerprint([split.experiment, champion, challenger, split.share])
    return Deal(
        experiment=f"{champion[:_SHOWN]}.{challenger[:_SHOWN]}.{identity[:8]}",
        alias=split.alias,
        champion=champion,
        challenger=challenger,
        share=split.share,
        key=bytes.fromhex(identity),
        bound=round(split.share * 2 ** (8 * _LOT_BYTES)),
    )


def set_up_deal(split: SplitSettings | None, aliases: dict[str, str]) -> Deal | NoDeal | None:
    """`aliases` are those whose releases are loaded."""
    if split is None:
        return None
    for alias in (split.alias, split.challenger):
        if alias not in aliases:
            return NoDeal(f"the alias {alias} points at nothing that is loaded")
    champion, challenger = aliases[split.alias], aliases[split.challenger]
    if champion == challenger:
        return NoDeal(f"{split.alias} and {split.challenger} are both {champion[:_SHOWN]}")
    return make_deal(split, champion=champion, challenger=challenger)


def is_between(experiment: str, one: str, other: str) -> bool:
    """Whether it is, or was, an experiment with these two releases."""
    first, _, rest = experiment.partition(".")
    return {first, rest.partition(".")[0]} == {one[:_SHOWN], other[:_SHOWN]}
