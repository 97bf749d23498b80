"""Who answers when the release that was asked for cannot: the chains of `serve.failover.fallback`.

In: the model of a request and the routes. Out: the next engine and release that can be asked. Used only
before the first byte of an answer.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.http.messages import ApiError
from graftwork.serve.routing import Routes
from graftwork.serve.serving_engine import ServingEngine

ANY_MODEL = "*"
_NAME = re.compile(r"[\w./-]{1,130}", re.ASCII)


class FallbackTarget(NamedTuple):
    release: str
    """What the answer is marked with: a release, `base`, or the name of an endpoint."""
    engine: ServingEngine
    model: str
    """What the engine is asked for."""
    passed: int
    """How many names of the chain were used or skipped to get here."""


class Fallbacks:
    def __init__(
        self,
        chains: Mapping[str, tuple[str, ...]],
        *,
        engine: ServingEngine,
        endpoints: Mapping[str, ServingEngine],
    ) -> None:
        self.chains = dict(chains)
        self._engine = engine
        self._endpoints = endpoints

    def covers(self, model: str) -> bool:
        """Whether the settings declare this name, so that it is answered even before it has a release."""
        return model in self.chains

    def has_endpoint(self, name: str) -> bool:
        return name in self._endpoints

    def ready_endpoints(self) -> list[str]:
        return [name for name, endpoint in self._endpoints.items() if endpoint.state == "ready"]

    def may_replace(self, names: Sequence[str], error: ApiError) -> bool:
        """Whether another model may answer. Before the aliases are loaded any sensible name may be one."""
        sensible = _NAME.fullmatch(names[0]) is not None
        return any(map(self.covers, names)) or (error.status == 503 and sensible)

    def find_next(
        self, names: Sequence[str], routes: Routes, *, passed: int = 0, failed: str | None = None
    ) -> FallbackTarget | None:
        """The next of the model's chain that is ready. `failed` is the release that was asked last."""
        chain, family = find_chain(self.chains, *names), routes.family
        if not chain and family is not None and family.name in names:
            # The main model answers for a specialist of the family that has no chain of its own.
            main = family.aliases[family.main]
            chain = () if names[0] == main else (main,)
        for place in range(passed, len(chain)):
            target = self.resolve(chain[place], routes, place + 1)
            if target is not None and target.release != failed:
                return target
        return None

    def resolve(self, name: str, routes: Routes, passed: int = 0) -> FallbackTarget | None:
        """The endpoint, alias or release of this name, if it can be asked now."""
        endpoint = self._endpoints.get(name)
        if endpoint is not None:
            model = endpoint.models[0] if endpoint.models else ""
            return FallbackTarget(name, endpoint, model, passed) if endpoint.state == "ready" else None
        if self._engine.state != "ready":
            return None
        try:
            release = routes.resolve(name)
        except ApiError:
            return None
        return FallbackTarget(release, self._engine, release, passed)


def find_chain(chains: Mapping[str, tuple[str, ...]], model: str, *aliases: str) -> tuple[str, ...]:
    """Who answers instead of the model, in order. Its own chain goes before those of its other names."""
    found = next((chains[name] for name in (model, *aliases, ANY_MODEL) if name in chains), ())
    return tuple(name for name in found if name != model)


def describe_fallback(model: str, why: str) -> str:
    """The value of the response header `x-graft-fallback`."""
    name = "".join(c if c.isascii() and c.isprintable() and c != ";" else "?" for c in model)
    return f"from={name}; why={why}"
