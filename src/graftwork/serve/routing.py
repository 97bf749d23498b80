"""Chooses who answers a request: a release and its engine, or an endpoint.

`choose_target` is the whole decision: the family's member, the alias, the arm of an experiment, and who
answers in its place. An experiment assigns a session to an arm by a keyed hash of the session id, so
the arm does not depend on the request, and is the same on every endpoint of the project and after a restart.
The key is made of the experiment's name, both releases and the share: changing any of them starts a new
experiment. `AliasWatcher` keeps the routes up to date and loads a release before its alias moves here.
`Fallbacks` has the chains of `serve.failover.fallback`, which are used only before the first byte of an
answer.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graftwork.engines.protocol import BASE
from graftwork.http.messages import RETRY, ApiError
from graftwork.records.base import fingerprint
from graftwork.records.errors import Busy, GraftError
from graftwork.records.interaction import Arm, TokenPrice
from graftwork.serve.api.call import ChatCall
from graftwork.serve.engine_interface import ServingEngine, failure_code
from graftwork.serve.family import Family
from graftwork.serve.metrics import Metrics
from graftwork.serve.request_log import OTHER_MODEL
from graftwork.serve.settings import ServedModel, ServeSettings, SplitSettings

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a release that could not be loaded is tried again. The pause doubles with each failure,
except while the store is busy: each attempt reads every byte of the release."""
_MIN_PREFIX = 8
_HASH_BYTES = 8
_ID_SHOWN = 12
ANY_MODEL = "*"
_NAME = re.compile(r"[\w./-]{1,130}", re.ASCII)

ResolveAliases = Callable[[], dict[str, str]]
"""Alias to release id, as of now. Called in a thread; may read a database."""

FindAdapter = Callable[[str], str | None]
"""The adapter folder of a release that is not loaded yet; None if it is not for this endpoint. Called in a
thread. Raises GraftError if the release cannot be loaded now."""


FindCanary = Callable[[], SplitSettings | None]
"""The experiment that a command started, which comes before that of the settings. Called in a thread."""


class ArmAssignment(NamedTuple):
    """The arm of one request, and the challenger's share in that experiment."""

    experiment: str
    arm: Arm
    share: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """A running experiment: both releases are loaded."""

    experiment: str
    alias: str
    champion: str
    challenger: str
    share: float
    key: bytes
    bound: int
    """Hashes below it belong to the challenger."""

    def assign(self, session: str) -> Arm:
        data = session.encode(errors="surrogatepass")
        digest = hashlib.blake2b(data, key=self.key, digest_size=_HASH_BYTES).digest()
        return "challenger" if int.from_bytes(digest) < self.bound else "champion"

    def release_of(self, arm: Arm) -> str:
        return self.challenger if arm == "challenger" else self.champion


def make_experiment(split: SplitSettings, *, champion: str, challenger: str) -> Experiment:
    identity = fingerprint([split.experiment, champion, challenger, split.share])
    return Experiment(
        experiment=f"{champion[:_ID_SHOWN]}.{challenger[:_ID_SHOWN]}.{identity[:8]}",
        alias=split.alias,
        champion=champion,
        challenger=challenger,
        share=split.share,
        key=bytes.fromhex(identity),
        bound=round(split.share * 2 ** (8 * _HASH_BYTES)),
    )


def set_up_experiment(split: SplitSettings | None, aliases: dict[str, str]) -> Experiment | str | None:
    """`aliases` are those whose releases are loaded. None without a split; a text says why it cannot run, so
    that the champion answers everything.
    """
    if split is None:
        return None
    for alias in (split.alias, split.challenger):
        if alias not in aliases:
            return f"the alias {alias} points at no loaded release"
    champion, challenger = aliases[split.alias], aliases[split.challenger]
    if champion == challenger:
        return f"{split.alias} and {split.challenger} are both {champion[:_ID_SHOWN]}"
    return make_experiment(split, champion=champion, challenger=challenger)


def is_experiment_between(experiment: str, first: str, second: str) -> bool:
    """Whether this experiment compares, or compared, these two releases."""
    champion, _, suffix = experiment.partition(".")
    return {champion, suffix.partition(".")[0]} == {first[:_ID_SHOWN], second[:_ID_SHOWN]}


@dataclass(frozen=True, slots=True)
class Routes:
    """`aliases` point only at loaded releases; `pending` are aliases whose new release is not loaded yet."""

    releases: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    experiment: Experiment | None = None
    experiment_off: str = ""
    """Why no experiment runs although one is configured."""
    refused: dict[str, str] = field(default_factory=dict)
    """Releases that aliases point at and that cannot be loaded, with the reason."""
    family: Family | None = None
    """Routes requests for its name; None if requests name their model."""
    chains: Collection[str] = ()
    """Names of chains, which are asked for like models."""
    models: Mapping[str, ServedModel] = field(default_factory=dict)
    """Model names of clients, from the settings."""
    shares: Mapping[str, Experiment] = field(default_factory=dict)
    """By such a name: who of its sessions the small model answers, where its release is loaded."""
    has_base: bool = True
    """Whether `base` can be asked: not where only endpoints answer."""
    loaded: bool = True
    """False until the aliases have been read and their releases loaded for the first time."""

    def resolve(self, name: str) -> str:
        """The engine's model for an alias, `base`, a release id or a prefix of one. Raises ApiError."""
        if name in self.aliases:
            return self.aliases[name]
        if (name == BASE and self.has_base) or name in self.releases:
            return name
        matches = [r for r in self.releases if r.startswith(name)] if len(name) >= _MIN_PREFIX else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            message = f"{name!r} is a prefix of {len(matches)} releases; give a longer one"
            raise ApiError(400, message, param="model", code="ambiguous_model")
        if name in self.pending:
            release = self.pending[name]
            why = f": {self.refused[release]}" if release in self.refused else ""
            message = f"the alias {name!r} points to {release}, which is not loaded{why}"
            raise ApiError(503, message, param="model", code="model_not_loaded", headers=RETRY)
        self.require_loaded()
        message = f"there is no model {name!r}; available: {', '.join(self.names())}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def require_loaded(self) -> None:
        """Raise with a status that clients retry: a model that is not loaded yet is not an unknown model."""
        if not self.loaded:
            message = "the server is starting: its aliases and releases are not loaded yet; try again soon"
            raise ApiError(503, message, code="starting", headers=RETRY)

    def knows(self, name: str) -> bool:
        """Whether it is a name of ours, loaded or not. A prefix of a release is not."""
        if self.family is not None and name in (self.family.name, *self.family.aliases.values()):
            return True
        if name in self.models:
            return True
        return name in self.aliases or name in self.pending or name == BASE or name in self.releases

    def names(self) -> dict[str, str]:
        """Every name that can be requested, with the model that answers it."""
        family = {} if self.family is None else {self.family.name: "family"}
        return {
            **{name: model.to for name, model in self.models.items()},
            **family,
            **dict.fromkeys(self.chains, "chain"),
            **self.aliases,
            **({BASE: BASE} if self.has_base else {}),
            **{release: release for release in sorted(self.releases)},
        }


def update_routes(
    old: Routes, *, aliases: dict[str, str], releases: frozenset[str], split: SplitSettings | None = None
) -> Routes:
    """New routes. An alias whose release is not loaded keeps its old release and is listed as pending."""
    loaded = {a: r for a, r in aliases.items() if r in releases}
    pending = {a: r for a, r in aliases.items() if r not in releases}
    for alias in pending:
        if old.aliases.get(alias) in releases:
            loaded[alias] = old.aliases[alias]
    experiment = set_up_experiment(split, loaded)
    return Routes(
        releases=releases,
        aliases=loaded,
        pending=pending,
        experiment=experiment if isinstance(experiment, Experiment) else None,
        experiment_off=experiment if isinstance(experiment, str) else "",
        family=old.family,
        chains=old.chains,
        models=old.models,
        shares=set_up_shares(old.models, loaded),
        has_base=old.has_base,
    )


def set_up_shares(models: Mapping[str, ServedModel], aliases: Mapping[str, str]) -> dict[str, Experiment]:
    """The experiment of each model name of which a loaded release answers a share."""
    shares = {}
    for name, model in models.items():
        if model.small is None or model.share is None or model.small not in aliases:
            continue
        split = SplitSettings(alias=name, challenger=model.small, share=model.share)
        champion = aliases.get(model.to, model.to)
        if champion != aliases[model.small]:
            shares[name] = make_experiment(split, champion=champion, challenger=aliases[model.small])
    return shares


class _Retry(NamedTuple):
    pause: float
    at: float
    why: str


class AliasWatcher:
    """Keeps `routes` up to date with the aliases of the project."""

    def __init__(
        self,
        engine: ServingEngine,
        *,
        resolve_aliases: ResolveAliases,
        find_adapter: FindAdapter,
        split: SplitSettings | None = None,
        names: Routes | None = None,
        find_canary: FindCanary = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._split = split
        self._resolve = resolve_aliases
        self._find = find_adapter
        self._find_canary = find_canary
        self._clock = clock
        self._retries: dict[str, _Retry] = {}
        self._refreshing = asyncio.Lock()
        # The family and the chains that a request may name, before any release is loaded.
        self.routes = names or Routes(loaded=False)

    def revise(self, split: SplitSettings | None, *, models: Mapping[str, ServedModel]) -> None:
        """Use other model names and another experiment from the next refresh on."""
        self._split = split
        self.routes = replace(self.routes, models=models, shares=set_up_shares(models, self.routes.aliases))

    async def refresh(self) -> None:
        async with self._refreshing:
            aliases = await asyncio.to_thread(self._resolve)
            split = await asyncio.to_thread(self._find_canary) or self._split
            missing = set(aliases.values()) - set(self._engine.models)
            # A release that no alias points at any more starts over when one points at it again.
            self._retries = {release: retry for release, retry in self._retries.items() if release in missing}
            for release in sorted(missing):
                if release not in self._retries or self._clock() >= self._retries[release].at:
                    # Requests follow the old routes until the new ones are in place: both are kept.
                    await self._load(release, keep={*aliases.values(), *self.routes.aliases.values()})
            releases = frozenset(self._engine.models) - {BASE}
            new = update_routes(self.routes, aliases=aliases, releases=releases, split=split)
            new = replace(new, refused={release: retry.why for release, retry in self._retries.items()})
            if (new.experiment, new.experiment_off) != (self.routes.experiment, self.routes.experiment_off):
                _log_experiment(new)
            self.routes = new

    async def follow(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.refresh()
            except Exception:
                # The database may be busy or unreachable for a while; the current routes stay valid.
                log.exception("aliases: cannot read them; keeping the last known ones")

    async def _load(self, release: str, *, keep: Collection[str]) -> None:
        """Load the release, or schedule a retry: the other aliases do not wait for it."""
        if self._engine.state != "ready":
            return
        try:
            folder = await asyncio.to_thread(self._find, release)
            if folder is not None:
                await self._engine.load_adapter(release, folder, keep=keep)
        except (GraftError, OSError) as error:
            before = self._retries.get(release)
            pause = FIRST_PAUSE
            if before is not None and not isinstance(error, Busy):
                pause = min(2 * before.pause, LONGEST_PAUSE)
            self._retries[release] = _Retry(pause, at=self._clock() + pause, why=str(error))
            why = f" ({error.why})" if isinstance(error, GraftError) and error.why else ""
            log.warning("aliases: %s is not loaded: %s%s; next try in %g s", release, error, why, pause)


def _log_experiment(routes: Routes) -> None:
    experiment = routes.experiment
    if experiment is None:
        if routes.experiment_off:
            log.warning("split: no experiment, the champion answers everything: %s", routes.experiment_off)
        else:
            log.info("split: the experiment has ended, the champion answers everything")
        return
    values = (experiment.experiment, 100 * experiment.share, experiment.alias, experiment.challenger[:12])
    log.info("split: experiment %s: %g %% of the sessions that ask for %s go to %s", *values)


class Target(NamedTuple):
    """Who answers a request."""

    release: str
    """What the answer is marked with: a release, `base`, or the name of an endpoint."""
    engine: ServingEngine
    model: str
    """What the engine is asked for."""
    name: str
    """What was asked for; for a family, the alias of its member."""
    passed: int = 0
    """How many names of the fallback chain were used or skipped to get here."""
    label: str = OTHER_MODEL
    """What was asked for, in metrics and logs: a known name, never a client's text."""
    assignment: ArmAssignment | None = None
    notes: Mapping[str, str] = {}
    """Response headers that say what family and fallback did with the request."""
    price: TokenPrice | None = None
    """What its tokens cost, where it is an endpoint with a known price."""
    upstream: str | None = None
    """The endpoint's model, where it is an endpoint and the model is not ours."""

    def fall_back_to(self, other: "Target", why: str) -> "Target":
        """Another model answers. It is not part of an experiment."""
        notes = {**self.notes, "x-graft-fallback": describe_fallback(self.name, why)}
        return other._replace(name=self.name, label=self.label, notes=notes)

    def escalate_to(self, large: "Target") -> "Target":
        """The large model answers in the place of this one, which still counts in its experiment. `upstream`
        stays unset: references for only what this one failed at would make tests of its failures.
        """
        return self._replace(release=large.release, engine=large.engine, model=large.model, price=large.price)


FindPrices = Callable[[ServeSettings], Mapping[str, TokenPrice]]
"""What tokens cost, by the names of endpoints."""


class Fallbacks:
    def __init__(
        self,
        chains: Mapping[str, tuple[str, ...]],
        *,
        engine: ServingEngine,
        endpoints: Mapping[str, ServingEngine],
        find_prices: FindPrices = lambda _settings: {},
    ) -> None:
        self.chains = dict(chains)
        self.engine = engine
        self._endpoints = endpoints
        self._find_prices = find_prices
        self.prices: Mapping[str, TokenPrice] = {}
        self._upstream: dict[str, str] = {}
        """The models of the endpoints that are not ours, by their names."""

    def revise(self, settings: ServeSettings) -> None:
        """Use the chains and the endpoints' prices of these settings from the next request on."""
        self.chains = dict(settings.failover.fallback)
        self.prices = self._find_prices(settings)
        endpoints = settings.failover.endpoints.items()
        self._upstream = {name: endpoint.model for name, endpoint in endpoints if not endpoint.own}

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
    ) -> Target | None:
        """The next of the model's chain that is ready. `failed` is the release that was asked last."""
        chain, family = find_chain(self.chains, *names), routes.family
        if not chain and family is not None and family.name in names:
            # The main model answers for a specialist of the family that has no chain of its own.
            main = family.aliases[family.main]
            chain = () if names[0] == main else (main,)
        if not chain and (model := routes.models.get(names[0])) is not None and model.small is not None:
            # The large model answers for a small one that has a share of its requests.
            chain = (model.to,)
        for index in range(passed, len(chain)):
            target = self.resolve(chain[index], routes, index + 1)
            if target is not None and target.release != failed:
                return target
        return None

    def resolve(self, name: str, routes: Routes, passed: int = 0) -> Target | None:
        """The endpoint, alias or release of this name, if it can be asked now."""
        endpoint = self._endpoints.get(name)
        if endpoint is not None:
            model = endpoint.models[0] if endpoint.models else ""
            if endpoint.state != "ready":
                return None
            upstream = self._upstream.get(name)
            return Target(name, endpoint, model, name, passed, price=self.prices.get(name), upstream=upstream)
        if self.engine.state != "ready":
            return None
        try:
            release = routes.resolve(name)
        except ApiError:
            return None
        return Target(release, self.engine, release, name, passed, price=self.prices.get(release))


def find_chain(chains: Mapping[str, tuple[str, ...]], model: str, *aliases: str) -> tuple[str, ...]:
    """Who answers instead of the model, in order. Its own chain goes before those of its other names."""
    names = next((chains[name] for name in (model, *aliases, ANY_MODEL) if name in chains), ())
    return tuple(name for name in names if name != model)


def describe_fallback(model: str, why: str) -> str:
    """The value of the response header `x-graft-fallback`."""
    name = "".join(c if c.isascii() and c.isprintable() and c != ";" else "?" for c in model)
    return f"from={name}; why={why}"


def choose_target(
    call: ChatCall,
    headers: Mapping[str, str],
    *,
    routes: Routes,
    fallbacks: Fallbacks,
    session: str,
    direct: Target | None = None,
    metrics: Metrics,
) -> Target:
    """Who answers a call in this session, counted. Raises ApiError if nobody can.

    The name of a family becomes that of its member. `direct` is asked instead of a release, where the model
    is an endpoint that settings name; so is a member that is an endpoint.
    """
    name, notes, family = call.model, {}, routes.family
    if family is not None and name == family.name:
        loaded = {*routes.aliases, *fallbacks.ready_endpoints()}
        member, by, why = family.choose(call, headers, loaded=loaded)
        metrics.routed[member, by] += 1
        name, notes = family.aliases[member], {"x-graft-route": f"{member} ({why})"}
        if (endpoint := family.settings.remote.get(member)) is not None:
            direct = fallbacks.resolve(endpoint, routes)
    if direct is not None:
        return direct._replace(name=name, label=direct.release, notes=notes)
    is_known = routes.knows(name) or fallbacks.covers(name)
    served = routes.models.get(name)
    try:
        if served is not None:
            target = choose_served(served, name, routes=routes, fallbacks=fallbacks, session=session)
            if target.assignment is not None:
                metrics.assigned[target.assignment.experiment, target.assignment.arm] += 1
            return target._replace(notes=notes)
        release, assignment = choose_release(routes, name, session=session)
    except ApiError as error:
        # No release yet, or one that is not loaded: a model with a fallback is answered all the same.
        why, names = failure_code(error) or str(error.code), (name, call.model)
        fallback = fallbacks.find_next(names, routes) if fallbacks.may_replace(names, error) else None
        if fallback is None:
            raise
        label = name if is_known else OTHER_MODEL
        asked = fallback._replace(name=name, label=label, notes=notes)
        metrics.fell_back[label, fallback.release, why] += 1
        return asked.fall_back_to(fallback, why)
    if assignment is not None:
        metrics.assigned[assignment.experiment, assignment.arm] += 1
    # Else it is the prefix of a release.
    label = name if is_known else release
    price = fallbacks.prices.get(release)
    return Target(release, fallbacks.engine, release, name, 0, label, assignment, notes, price)


def choose_release(routes: Routes, model: str, *, session: str) -> tuple[str, ArmAssignment | None]:
    """The release of a model in this session; its arm where an experiment applies. Raises ApiError."""
    release, experiment = routes.resolve(model), routes.experiment
    if experiment is None or model != experiment.alias:
        return release, None
    arm = experiment.assign(session)
    assignment = ArmAssignment(experiment.experiment, arm, experiment.share)
    return experiment.release_of(arm), assignment


def choose_served(
    model: ServedModel, name: str, *, routes: Routes, fallbacks: Fallbacks, session: str
) -> Target:
    """Who answers a model name of clients in this session. Raises ApiError."""
    to, assignment, experiment = model.to, None, routes.shares.get(name)
    if experiment is not None:
        arm = experiment.assign(session)
        assignment = ArmAssignment(experiment.experiment, arm, experiment.share)
        to = experiment.release_of(arm)
    if not fallbacks.has_endpoint(to):
        release = routes.resolve(to)
        price = fallbacks.prices.get(release)
        return Target(
            release, fallbacks.engine, release, name, label=name, assignment=assignment, price=price
        )
    target = fallbacks.resolve(to, routes)
    if target is None:
        message = f"the endpoint {to} is not ready; try again soon"
        raise ApiError(503, message, param="model", code="engine_down", headers=RETRY)
    return target._replace(name=name, label=name, assignment=assignment)
