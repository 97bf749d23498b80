"""The `cycle` section of graft.yaml: when to train again, where, who approves and who is notified.

A schedule is a cron expression (`cron.py`).
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from graftwork.cycle.cron import parse_cron
from graftwork.records.base import NotSecret, Record, SecretLink, SecretText
from graftwork.records.week import ZoneName

COLLECT, CANARY, PROMOTE, DELIVER, REPORT = "collect", "canary", "promote", "deliver", "report"
CYCLE_STEPS = (
    COLLECT, "audit", "prepare", "plan", "train", "evaluate", "gate", "release", "try", CANARY, PROMOTE,
    DELIVER, REPORT,
)  # fmt: skip
"""The steps of a cycle in their order: those of `graft run`, with what comes before and after."""

NoticeKind = Literal[
    "gate", "promoted", "rolled_back", "approval", "stalled", "spend", "failed", "paused", "finished"
]
NOTICE_KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
QUIET: tuple[NoticeKind, ...] = ("finished",)
"""Notices that are sent only on request."""


def _require_cron(expression: str) -> str:
    parse_cron(expression)
    return expression


class TriggerSettings(Record):
    """A cycle begins when one of these holds; they are checked every ten minutes."""

    new_rows: int | None = Field(
        None, ge=1, description="Usable captures and new log rows since the last cycle."
    )
    drift: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of live prompts that are unlike any training prompt (lower end of the interval).",
    )

    @property
    def is_set(self) -> bool:
        return self.new_rows is not None or self.drift is not None


class CanarySettings(Record):
    """A new release answers a share of live sessions first (`serve.split`), and is promoted if it holds."""

    minutes: float = Field(60.0, ge=0, description="How long to watch, unless it is decided earlier.")
    fewest_sessions: int = Field(
        100,
        ge=0,
        description="Sessions of the new release to wait for, at most three times `minutes`. After 20, a "
        "release that fails 40 % of requests is often missed; after 100, hardly ever.",
    )
    metric: str = Field(
        "feedback", description="Metric to compare the two by, as in `graft release ab --metric`."
    )


class DeliverSettings(Record):
    """A serving machine that gets the promoted release."""

    to: Annotated[str, NotSecret("a host and a folder, or the URL of a store")] = Field(
        min_length=1,
        description="`[user@]host:/folder` of a project in which `graft serve` runs, `here`, or the URL of a "
        "store.",
    )
    graft: str = Field("graft", description="The `graft` command on that machine.")


def _as_deliveries(value: Any) -> Any:
    """One line will do: `deliver: gpu1:/srv/helpdesk`."""
    listed = value if isinstance(value, list | tuple) else [value]
    return [{"to": item} if isinstance(item, str) else item for item in listed]


class NotifySettings(Record):
    """Who is notified of what. Notices are kept until they are delivered."""

    kinds: tuple[NoticeKind, ...] = Field(
        tuple(kind for kind in NOTICE_KINDS if kind not in QUIET), description="Which notices to send."
    )
    command: SecretText | None = Field(
        None, description="A command that receives the notice as JSON on standard input."
    )
    webhook: SecretLink | None = Field(None, description="An http(s) URL that receives the notice as JSON.")


class CycleSettings(Record):
    """What `graft up` does: collect, data, plan, train, evaluate, gate, release, canary, promote, deliver."""

    schedule: Annotated[str, AfterValidator(_require_cron)] | None = Field(
        None, description="A cron expression, such as `0 2 * * *`, or @daily. Unset: no fixed times."
    )
    timezone: ZoneName = Field("UTC", description="The time zone of the schedule, such as Europe/Berlin.")
    when: TriggerSettings = Field(default_factory=TriggerSettings, description="Events that start a cycle.")
    models: tuple[str, ...] = Field(
        (), description="Models to run a cycle for, one after the other; empty: the main model."
    )
    collect: str | None = Field(
        None,
        description="Log file to export captures to first; `data.logs` must match it. Unset: read the logs "
        "as they are.",
    )
    place: str = Field(
        "local",
        min_length=1,
        description="Where to train: local, or a place from `graft fleet places`. Its cost is limited by "
        "`fleet.caps`.",
    )
    gpu: str = Field("", description="GPU to order at a place; empty: the cheapest.")
    approve: tuple[str, ...] = Field(
        (), description="Steps that wait for approval, such as train or promote: `graft up approve`."
    )
    canary: CanarySettings | None = Field(
        None, description="Watch a new release in live traffic before it is promoted; needs `serve.split`."
    )
    deliver: Annotated[tuple[DeliverSettings, ...], BeforeValidator(_as_deliveries)] = Field(
        (), description="Where to send promoted releases: `gpu1:/srv/helpdesk`, or a list."
    )
    notify: NotifySettings = Field(default_factory=NotifySettings, description="Notifications.")

    @model_validator(mode="after")
    def _known_steps(self) -> Self:
        unknown = [step for step in self.approve if step not in CYCLE_STEPS]
        if unknown:
            raise ValueError(f"approve: there is no step {unknown[0]!r}; known: {', '.join(CYCLE_STEPS)}")
        return self
