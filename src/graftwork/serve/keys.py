"""API keys: who may ask for what, how much, and until when.

Input: the keys of the project's store and the one of an environment variable. Output: the holder of the key
in a request, or a refusal. Only SHA-256 digests of the secrets are known here. A key is found by the digest
of what was sent, so the time of a look-up says nothing about any secret. What keys and escalations have used
is kept in a file: a restart must not give them their budgets again.
"""

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError

from graftwork.files.disk import write_atomic
from graftwork.http.messages import ApiError, Request
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.serve.budgets import DAY_SECONDS, KeyBudget, KeyUsage, RequestBudget
from graftwork.serve.metrics import render_counts

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 1.0
"""How long a created key may take to work, and a revoked one to stop."""

Scope = Literal["models", "feedback", "traces", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
DEFAULT_SCOPES: tuple[Scope, ...] = ("models", "feedback")
SECRET_PREFIX = "sk-graft-"
"""In the form of OpenAI's keys, which redaction and secret scanners know."""
_SECRET_BYTES = 32
_WARN_SECONDS = 60.0


class ApiKey(Record):
    """A key as it is stored: what it may do, and the digest of its secret."""

    id: str
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/-]*$")
    digest: str
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES
    models: tuple[str, ...] = ()
    """The names that may be asked for; empty for all."""
    budget: KeyBudget = KeyBudget()
    created_at: str
    expires_at: str | None = None
    revoked_at: str | None = None

    @property
    def state(self) -> Literal["valid", "expired", "revoked"]:
        if self.revoked_at is not None:
            return "revoked"
        is_over = self.expires_at and datetime.fromisoformat(self.expires_at) <= datetime.now(UTC)
        return "expired" if is_over else "valid"


LoadKeys = Callable[[], tuple[ApiKey, ...]]
"""All keys of the project, revoked ones too. Called in a thread; may read a database."""


def make_secret() -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_secret(secret: str | bytes) -> str:
    """Secrets are random and long: a slow hash would protect them no better."""
    data = secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret
    return hashlib.sha256(data).hexdigest()


class KeyHolder:
    """A key in use."""

    __slots__ = ("_expires", "id", "models", "name", "scopes", "usage")

    def __init__(
        self,
        name: str,
        *,
        id: str = "",
        scopes: Iterable[Scope] = SCOPES,
        models: Iterable[str] = (),
        usage: KeyUsage | None = None,
        expires: float | None = None,
    ) -> None:
        self.name = name
        self.id = id
        self.scopes = frozenset(scopes)
        self.models = frozenset(models)
        self.usage = usage or KeyUsage(name, KeyBudget())
        self._expires = expires

    def revise(self, key: "ApiKey") -> None:
        """Update from the key as it is stored now; its usage and reservations stay."""
        self.name, self.scopes, self.models = key.name, frozenset(key.scopes), frozenset(key.models)
        self._expires = _read_expiry(key)
        self.usage.revise(key.name, key.budget)

    @property
    def expired(self) -> bool:
        return self._expires is not None and time.time() >= self._expires

    def require(self, scope: Scope) -> None:
        if scope not in self.scopes:
            message = f"the key {self.name!r} does not have the scope {scope}"
            raise ApiError(403, message, code="missing_scope")

    def require_model(self, name: str) -> None:
        if self.models and name not in self.models:
            allowed = ", ".join(sorted(self.models))
            message = f"the key {self.name!r} may not ask for {name!r}; it may ask for: {allowed}"
            raise ApiError(403, message, param="model", code="model_not_allowed")


ANYONE = KeyHolder("anyone")
"""Who asks if no key is needed."""
ENVIRONMENT_KEY = "serve.api_key_env"
"""The name of the key that an environment variable holds."""


class KeyRing:
    """The keys that are valid now. Used from the event loop only."""

    def __init__(self, environment_key: str | None = None) -> None:
        self._fixed: dict[str, KeyHolder] = {}
        if environment_key is not None:
            self._fixed[digest_secret(environment_key)] = KeyHolder(ENVIRONMENT_KEY)
        self._holders = dict(self._fixed)
        self._past: dict[str, tuple[int, ...]] = {}
        self.required = environment_key is not None
        """Whether a request needs a key."""

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Take over the keys of the store. Keys that remain keep their usage."""
        by_id = {holder.id: holder for holder in self._holders.values() if holder.id}
        holders = dict(self._fixed)
        stored = False
        for key in keys:
            stored = True
            if key.revoked_at is None:
                holder = by_id.get(key.id)
                if holder is None:
                    holder = hold(key)
                    if (counts := self._past.pop(key.id, None)) is not None:
                        holder.usage.restore(counts)
                else:
                    holder.revise(key)
                holders[key.digest] = holder
        self._holders = holders
        # Revoking the last key must not open the endpoint.
        self.required = stored or bool(self._fixed)

    def restore_usage(self, past: Mapping[str, tuple[int, ...]]) -> None:
        """What keys had used before, by their ids; those that are not known yet get it with their holder."""
        self._past = dict(past)
        for holder in self._holders.values():
            if holder.usage.requests == 0 and (counts := self._past.pop(holder.id, None)) is not None:
                holder.usage.restore(counts)

    def count_usage(self) -> dict[str, tuple[int, ...]]:
        """What each key of the store has used, by its id."""
        used = {holder.id: holder.usage.snapshot() for holder in self._holders.values() if holder.id}
        return {**self._past, **{id: counts for id, counts in used.items() if counts[4] or counts[5]}}

    def find(self, request: Request) -> KeyHolder | None:
        """The holder of the key in the request; None if it is missing, unknown or expired."""
        if not self.required:
            return ANYONE
        authorization = request.headers.get("authorization")
        if authorization is None:
            secret = request.headers.get("x-api-key", "")
        elif authorization[:7].lower() == "bearer ":
            secret = authorization[7:]
        else:
            return None
        # Headers are decoded as Latin-1; what was sent may be UTF-8.
        holder = self._holders.get(digest_secret(secret.encode("latin-1", errors="replace")))
        return None if holder is None or holder.expired else holder

    def require(self, request: Request) -> KeyHolder:
        holder = self.find(request)
        if holder is None:
            hint = "send it as `Authorization: Bearer …` or `x-api-key`"
            raise ApiError(401, f"the API key is missing, wrong or expired; {hint}", code="invalid_api_key")
        return holder

    @property
    def holders(self) -> list[KeyHolder]:
        return list(self._holders.values())


def render_keys(ring: KeyRing) -> str:
    """What each key has used, as Prometheus text. Names are given by the operator."""
    if not ring.required:
        return ""
    lines: list[str] = []
    for what in ("requests", "tokens"):
        used = [((holder.name,), getattr(holder.usage, what)) for holder in ring.holders]
        lines += render_counts(f"graft_key_{what}_total", ("key",), used)
    return "".join(line + "\n" for line in lines)


def _read_expiry(key: ApiKey) -> float | None:
    return None if key.expires_at is None else datetime.fromisoformat(key.expires_at).timestamp()


def hold(key: ApiKey) -> KeyHolder:
    return KeyHolder(
        key.name,
        id=key.id,
        scopes=key.scopes,
        models=key.models,
        usage=KeyUsage(key.name, key.budget),
        expires=_read_expiry(key),
    )


def is_usable(key: ApiKey) -> bool:
    return key.revoked_at is None and not hold(key).expired


async def follow_keys(ring: KeyRing, load: LoadKeys, *, seconds: float = _REFRESH_SECONDS) -> None:
    """Keep the ring up to date: new keys work and revoked ones stop without a restart."""
    warned = float("-inf")
    current: tuple[ApiKey, ...] | None = None
    while True:
        await asyncio.sleep(seconds)
        try:
            keys = await asyncio.to_thread(load)
        except Exception as error:
            # The database may be busy or unreachable for a while; the known keys stay valid.
            if time.monotonic() - warned >= _WARN_SECONDS:
                warned = time.monotonic()
                log.warning("keys: cannot read them (%s); keeping the last known ones", type(error).__name__)
            continue
        if keys is not current:
            current = keys
            ring.replace(keys)


USAGE_FILE = "key_usage.json"
_SAVE_SECONDS = 1.0
_Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=6, max_length=6)]


class SavedUsage(Record):
    """By the id of the key: number, requests and tokens of its minute, then of its day."""

    keys: dict[str, _Counts] = {}
    escalations: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    """The number of the day, and how many it had."""


class UsageFile:
    def __init__(self, folder: Path, ring: KeyRing, escalations: RequestBudget | None = None) -> None:
        self._path = folder / USAGE_FILE
        self._ring = ring
        self._escalations = escalations
        self._saved = SavedUsage()
        self._lock = threading.Lock()
        self._begun = self._written = 0
        self._warned_at = float("-inf")

    def restore(self) -> None:
        """Continue with the usage at the end of the last endpoint."""
        today = int(time.time() // DAY_SECONDS)
        try:
            saved = SavedUsage.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            # Without the counts keys get their budgets again, which is better than no endpoint.
            log.warning(
                "keys: what they have used cannot be read (%s); it starts at zero", type(error).__name__
            )
            return
        keys = {id: counts for id, counts in saved.keys.items() if counts[3] == today}
        self._saved = SavedUsage(keys=keys, escalations=saved.escalations)
        self._ring.restore_usage(keys)
        if self._escalations is not None and saved.escalations is not None:
            self._escalations.restore(saved.escalations)

    async def follow(self, seconds: float = _SAVE_SECONDS) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.save()

    async def save(self) -> None:
        """Write the counts if they have changed. A full disk costs the counts, never an answer."""
        # A start without `serve.escalate` must not give the day's budget again.
        escalations = self._saved.escalations
        if self._escalations is not None:
            snapshot = self._escalations.snapshot()
            escalations = snapshot if snapshot[0] >= 0 else None
        counts = SavedUsage.model_construct(keys=self._ring.count_usage(), escalations=escalations)
        if counts == self._saved:
            return
        self._begun += 1
        try:
            await asyncio.to_thread(self._write, counts, self._begun)
        except GraftError as error:
            if time.monotonic() - self._warned_at >= _WARN_SECONDS:
                self._warned_at = time.monotonic()
                log.warning("keys: what they have used cannot be written: %s", error.what)
            return
        self._saved = counts

    def _write(self, counts: SavedUsage, number: int) -> None:
        # A write that was cancelled still runs in its thread, and must not replace a later one.
        with self._lock:
            if number > self._written:
                write_atomic(self._path, counts.to_json(), durable=False, private=True)
                self._written = number
