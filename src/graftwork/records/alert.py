"""Something about a run that somebody should know now."""

from typing import Literal

from graftwork.records.base import Record

AlertKind = Literal["stalled", "recovered", "restarted", "out_of_memory", "failed"]


class Alert(Record):
    """What a command gets on its input and a webhook as its body. Holds nothing secret."""

    kind: AlertKind
    run: str
    project: str = ""
    what: str
    why: str = ""
    fix: str = ""
    at: float
    host: str = ""
