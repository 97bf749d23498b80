"""New settings for a running endpoint, on SIGHUP or `graft serve --reload`. No request is dropped.

`plan_reload` says which of them take effect at once, and which need a restart. The gateway holds a lock in
its folder, by which `graft serve --reload` finds it, and writes there what each reload did.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.process.worker import lock_holder
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserMistake, WorkerFailed
from graftwork.serve.engines import EngineSet
from graftwork.serve.gateway import Gateway
from graftwork.serve.routing import AliasWatcher
from graftwork.serve.settings import ServeSettings

RELOADED = frozenset(
    {
        "alias_refresh_seconds",
        "default_model",
        "drain_seconds",
        "failover",
        "max_new_tokens",
        "max_new_tokens_limit",
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


log = logging.getLogger(__name__)

RELOAD_SIGNAL = signal.SIGUSR1

ReadSettings = Callable[[], ServeSettings]
"""The settings as they are now. Called in a thread. Raises GraftError if they are not valid."""


def gateway_folder(serving: Path) -> Path:
    """Where the gateway of a project holds its lock."""
    return serving / "gateway"


class SettingsReloader:
    """Set `asked` to reload; `follow` does the work."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        read: ReadSettings | None,
        gateway: Gateway,
        engines: EngineSet,
        watcher: AliasWatcher,
        folder: Path,
    ) -> None:
        self.settings = settings
        self.asked = asyncio.Event()
        self.number = 0
        self._read, self._gateway, self._engines, self._watcher = read, gateway, engines, watcher
        self._folder = folder

    async def follow(self) -> None:
        (self._folder / RESULT_FILE).unlink(missing_ok=True)
        while True:
            await self.asked.wait()
            self.asked.clear()
            try:
                result = await self.reload()
                await asyncio.to_thread(write_atomic, self._folder / RESULT_FILE, result.to_json())
            except Exception:
                log.exception("reload failed; the endpoint keeps its settings")

    async def reload(self) -> ReloadResult:
        """Take over the settings and read the aliases. Invalid settings change nothing."""
        self.number += 1
        try:
            new = self.settings if self._read is None else await asyncio.to_thread(self._read)
            plan = plan_reload(self.settings, new)
            self._engines.revise(plan.settings)
        except (GraftError, OSError) as error:
            log.warning("reload: nothing changed: %s", error)
            return ReloadResult(number=self.number, error=str(error))
        self.settings = plan.settings
        self._gateway.revise(plan.settings)
        self._watcher.revise(plan.settings.split, seconds=plan.settings.alias_refresh_seconds)
        try:
            await self._watcher.refresh()
        except Exception:
            log.exception("reload: cannot read the aliases; they are read again soon")
        log.info("reload: changed %s", ", ".join(plan.changed) or "nothing")
        if plan.restart:
            log.warning("reload: these need a restart: %s", ", ".join(plan.restart))
        return ReloadResult(number=self.number, changed=plan.changed, restart=plan.restart)


_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


def reload_endpoint(serving: Path) -> ReloadResult:
    """What the endpoint changed. Raises where none runs, or where it refuses the settings."""
    folder = gateway_folder(serving)
    process = lock_holder(folder)
    if process is None or process <= 0:
        raise UserMistake(
            "no endpoint of this project runs here",
            why="there is nothing to reload",
            fix="`graft serve` starts it with the settings as they are now",
            where=str(folder),
        )
    before = _read(folder)
    number = before.number if before is not None else 0
    os.kill(process, RELOAD_SIGNAL)
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline and lock_holder(folder) == process:
        result = _read(folder)
        if result is None or result.number <= number:
            time.sleep(_POLL_SECONDS)
        elif result.error is None:
            return result
        else:
            raise UserMistake(
                f"the endpoint keeps its old settings: {result.error}",
                why="settings that are not valid change nothing",
                fix="correct graft.yaml and reload again",
            )
    raise WorkerFailed(
        "the endpoint did not reload",
        why=f"process {process} gave no answer for {_WAIT_SECONDS:.0f} s, or has ended",
        fix="look at its output; `graft status` shows whether it answers",
    )


def _read(folder: Path) -> ReloadResult | None:
    try:
        return ReloadResult.from_json((folder / RESULT_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
