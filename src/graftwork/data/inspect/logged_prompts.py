"""The system prompts that the logs have for given rows, redacted as the rows are.

In: the settings, the features of the logs, the origins of rows. Out: the logged system prompt of each, where
it has one. Nothing of it is in the dataset: what a dataset drops or replaces stays out of it.
"""

from collections.abc import Iterable
from pathlib import Path

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus.build import build_corpus
from graftwork.records.interaction import Origin


def find_logged_prompts(
    context: AuditContext, origins: Iterable[Origin], *, features: Path, root: Path
) -> dict[Origin, str]:
    """By origin. A line with several rows gives the prompt of its first."""
    wanted = set(origins)
    corpus = build_corpus(context, folder=features, root=root, on_progress=lambda _phase, _done, _total: None)
    places = [place for place in range(corpus.rows) if corpus.origin(place) in wanted]
    found: dict[Origin, str] = {}
    for _, row in corpus.rows_at(places):
        text = "\n\n".join(turn.content for turn in row.messages if turn.role == "system")
        if text:
            found.setdefault(row.origin, text)
    return found
