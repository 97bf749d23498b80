"""Who answers a session that takes part in an experiment: drawn by lot, and the same every time.

In: the settings of the split, where the aliases point, the name of a session. Out: the arm. The lot is a
keyed hash of the session alone, so it knows nothing of what is asked, holds on every endpoint of the project
and after a restart. The key is made of the experiment's name, both releases and the share: change one of
them, and it is a new experiment that deals anew. Pure.
"""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from graftwork.records.base import fingerprint
from graftwork.records.capture import Arm
from graftwork.serve.engine_protocol import BASE
from graftwork.serve.http_messages import ApiError
from graftwork.serve.settings import SplitSettings

_LOT_BYTES = 8
_SHOWN = 12
"""Characters of a release's id, as everywhere where one is shown."""


class ArmAssignment(NamedTuple):
    """What was drawn for one exchange: by which experiment, and what share the challenger has in it."""

    experiment: str
    arm: Arm
    share: float


@dataclass(frozen=True, slots=True)
class Experiment:
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
class ExperimentOff:
    """A split is set and cannot be: the champion answers all."""

    why: str


def make_experiment(split: SplitSettings, *, champion: str, challenger: str) -> Experiment:
    identity = fingerprint([split.experiment, champion, challenger, split.share])
    return Experiment(
        experiment=f"{champion[:_SHOWN]}.{challenger[:_SHOWN]}.{identity[:8]}",
        alias=split.alias,
        champion=champion,
        challenger=challenger,
        share=split.share,
        key=bytes.fromhex(identity),
        bound=round(split.share * 2 ** (8 * _LOT_BYTES)),
    )


def set_up_experiment(
    split: SplitSettings | None, aliases: dict[str, str]
) -> Experiment | ExperimentOff | None:
    """`aliases` are those whose releases are loaded."""
    if split is None:
        return None
    for alias in (split.alias, split.challenger):
        if alias not in aliases:
            return ExperimentOff(f"the alias {alias} points at nothing that is loaded")
    champion, challenger = aliases[split.alias], aliases[split.challenger]
    if champion == challenger:
        return ExperimentOff(f"{split.alias} and {split.challenger} are both {champion[:_SHOWN]}")
    return make_experiment(split, champion=champion, challenger=challenger)


def is_experiment_between(experiment: str, one: str, other: str) -> bool:
    """Whether it is, or was, an experiment with these two releases."""
    first, _, rest = experiment.partition(".")
    return {first, rest.partition(".")[0]} == {one[:_SHOWN], other[:_SHOWN]}


_SHORTEST_PREFIX = 8
RETRY = (("retry-after", "1"),)


@dataclass(frozen=True, slots=True)
class Routes:
    """`aliases` point only to releases that the engine holds; `pending` are those that do not yet."""

    releases: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    deal: Experiment | None = None
    """The experiment that draws who answers one of the aliases."""
    no_deal: str = ""
    """Why there is none although one is set."""
    loaded: bool = True
    """False until the aliases have been read and their releases loaded for the first time."""

    def resolve(self, name: str) -> str:
        """The engine's model for `name`: an alias, `base`, a release id or its first 8+ characters."""
        if name in self.aliases:
            return self.aliases[name]
        if name == BASE or name in self.releases:
            return name
        found = [r for r in self.releases if r.startswith(name)] if len(name) >= _SHORTEST_PREFIX else []
        if len(found) == 1:
            return found[0]
        if found:
            message = f"{name!r} is the beginning of {len(found)} releases; give more of it"
            raise ApiError(400, message, param="model", code="ambiguous_model")
        if name in self.pending:
            message = f"the alias {name!r} points to {self.pending[name]}, which is not loaded"
            raise ApiError(503, message, param="model", code="model_not_loaded", headers=RETRY)
        self.require_loaded()
        known = ", ".join(self.names())
        message = f"there is no model {name!r}; known are: {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def require_loaded(self) -> None:
        """Refuse with a status that clients retry: what is not known yet is not unknown."""
        if not self.loaded:
            message = "the server is starting: its aliases and releases are not loaded yet; try again soon"
            raise ApiError(503, message, code="starting", headers=RETRY)

    def names(self) -> dict[str, str]:
        """Every name that can be asked for, with what answers it."""
        return {**self.aliases, BASE: BASE, **{release: release for release in sorted(self.releases)}}


def update_routes(
    old: Routes, *, aliases: dict[str, str], releases: frozenset[str], split: SplitSettings | None = None
) -> Routes:
    """New routes. An alias whose release is not loaded stays where it was, and is named as pending."""
    held = {a: r for a, r in aliases.items() if r in releases}
    pending = {a: r for a, r in aliases.items() if r not in releases}
    for alias in pending:
        if old.aliases.get(alias) in releases:
            held[alias] = old.aliases[alias]
    deal = set_up_experiment(split, held)
    return Routes(
        releases=releases,
        aliases=held,
        pending=pending,
        deal=deal if isinstance(deal, Experiment) else None,
        no_deal=deal.why if isinstance(deal, ExperimentOff) else "",
    )
