"""An example extension of graftwork: rows with `ticket` and `resolution`, and a metric for polite answers."""

from typing import Any

from graftwork.grading.interface import GradeContext
from graftwork.records.interaction import Interaction, Message, Origin
from graftwork.records.report import Case


class HelpdeskFormat:
    """Rows such as {"ticket": "Where is my parcel?", "resolution": "It arrives today.", "queue": "post"}."""

    expects = "ticket and resolution"

    def fits(self, row: dict[str, Any]) -> bool:
        return "ticket" in row and "resolution" in row

    def read(self, row: dict[str, Any], origin: Origin) -> list[Interaction]:
        return [
            Interaction(
                id=str(row.get("id", origin)),
                origin=origin,
                messages=(Message(role="user", content=str(row["ticket"])),),
                reply=str(row["resolution"]),
                group=row.get("queue"),
            )
        ]


HELPDESK = HelpdeskFormat()


class Polite:
    """Right if the answer thanks the user or says please."""

    scored = False
    against_reference = False

    def grade(self, case: Case, answer: str, context: GradeContext) -> float:
        return float(any(phrase in answer.lower() for phrase in ("please", "thank")))


POLITE = Polite()
