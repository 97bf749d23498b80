"""New settings for a running endpoint: which of them take effect at once, and which need a restart.

In: the old and the new settings. Out: the settings to go on with, and what changed. Carrying it out is the
business of `run.py`.
"""

from typing import NamedTuple

from graftwork.records.base import Record
from graftwork.serve.settings import ServeSettings

RELOADED = frozenset(
    {
        "alias_refresh_seconds",
        "default_model",
        "drain_seconds",
        "failover",
        "max_new_tokens",
        "max_new_tokens_limit",
        "max_schema_bytes",
        "queue_limit",
        "request_timeout_seconds",
        "split",
    }
)
"""Settings of `serve` that a running endpoint takes over."""
_ENGINE_TIMES = ("probe_seconds", "frozen_seconds", "restart_seconds", "start_seconds")
"""Settings of `serve.failover` that an engine gets when it starts."""
RESULT_FILE = "reload.json"


class ReloadPlan(NamedTuple):
    settings: ServeSettings
    changed: tuple[str, ...]
    """Settings that take effect now."""
    restart: tuple[str, ...]
    """Settings that differ and keep their old value until the endpoint is started again."""


class ReloadResult(Record):
    """What the last reload did; `number` counts the reloads of this endpoint."""

    number: int
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    error: str | None = None


def plan_reload(old: ServeSettings, new: ServeSettings) -> ReloadPlan:
    """An engine may change its replicas; everything else about it needs a restart, and the gate."""
    names = [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]
    update = {name: getattr(new, name) for name in names if name in RELOADED}
    changed, restart = sorted(update), sorted(set(names) - RELOADED)
    if "engine" in restart and old.engine.model_copy(update={"replicas": new.engine.replicas}) == new.engine:
        update["engine"] = new.engine
        changed.append("engine.replicas")
        restart.remove("engine")
    if "failover" in update:
        kept = {name: getattr(old.failover, name) for name in _ENGINE_TIMES}
        restart += [f"failover.{name}" for name in _ENGINE_TIMES if getattr(new.failover, name) != kept[name]]
        update["failover"] = new.failover.model_copy(update=kept)
        if update["failover"] == old.failover:
            changed.remove("failover")
    return ReloadPlan(old.model_copy(update=update), tuple(changed), tuple(restart))
