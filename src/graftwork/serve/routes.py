"""From the name that a caller asks for to the model that answers.

In: aliases (name to release) and the models that the engine holds. Out: the engine's model, or a
refusal that lists what can be asked for. Pure.
"""

from dataclasses import dataclass, field

from graftwork.serve.messages import ApiError
from graftwork.serve.protocol import BASE
from graftwork.serve.settings import SplitSettings
from graftwork.serve.split import Deal, NoDeal, set_up_deal

_SHORTEST_PREFIX = 8
RETRY = (("retry-after", "1"),)


@dataclass(frozen=True, slots=True)
class Routes:
    """`aliases` point only to releases that the engine holds; `pending` are those that do not yet."""

    releases: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    deal: Deal | None = None
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


def move_aliases(
    old: Routes, *, aliases: dict[str, str], releases: frozenset[str], split: SplitSettings | None = None
) -> Routes:
    """New routes. An alias whose release is not loaded stays where it was, and is named as pending."""
    held = {a: r for a, r in aliases.items() if r in releases}
    pending = {a: r for a, r in aliases.items() if r not in releases}
    for alias in pending:
        if old.aliases.get(alias) in releases:
            held[alias] = old.aliases[alias]
    deal = set_up_deal(split, held)
    return Routes(
        releases=releases,
        aliases=held,
        pending=pending,
        deal=deal if isinstance(deal, Deal) else None,
        no_deal=deal.why if isinstance(deal, NoDeal) else "",
    )
