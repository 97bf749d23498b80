"""Kept rows to tokens.

In: rows and a renderer. Out: the rendered rows, and a drop for each row that is too long or leaves
nothing to train on. Rows are never cut: half an answer teaches half answers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graftwork.data.ports import Renderer
from graftwork.data.repeats import prompt_text
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import Drop, Row, SplitSummary
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Interaction
from graftwork.text.compare import content_key

REPORT_EVERY = 64


class Rendering(NamedTuple):
    """`kept` and `rows` run in step."""

    kept: list[Interaction]
    rows: list[Row]
    drops: list[Drop]


def render_rows(
    interactions: Sequence[Interaction],
    *,
    settings: DataSettings,
    renderer: Renderer,
    on_progress: Callable[[str, int, int], None],
) -> Rendering:
    rendering = Rendering([], [], [])
    refused: UserMistake | None = None
    for place, interaction in enumerate(interactions):
        if place % REPORT_EVERY == 0:
            on_progress("render", place, len(interactions))
        try:
            row = _render(interaction, renderer)
            reason = _find_reason_to_drop(row, settings)
        except UserMistake as error:
            # One row that the template refuses is dropped; a template that refuses all is a mistake.
            refused = refused or error
            reason = f"refused by the template: {error.what}"
        if reason:
            rendering.drops.append(Drop(origin=interaction.origin, step="render", reason=reason))
        else:
            rendering.kept.append(interaction)
            rendering.rows.append(row)
    if refused and not rendering.rows:
        raise refused
    on_progress("render", len(interactions), len(interactions))
    return rendering


def summarise(rows: Sequence[Row], *, groups: int, sha256: str) -> SplitSummary:
    return SplitSummary(
        rows=len(rows),
        groups=groups,
        tokens=sum(len(row.tokens) for row in rows),
        trained_tokens=sum(len(row.tokens) - row.trained_from for row in rows),
        longest=max((len(row.tokens) for row in rows), default=0),
        sha256=sha256,
    )


def _render(interaction: Interaction, renderer: Renderer) -> Row:
    rendered = renderer.render(interaction.messages, interaction.reply)
    return Row(
        # Logs repeat their own ids; the content is what makes a row the one it is.
        id=content_key(prompt_text(interaction), interaction.reply)[:16],
        origin=interaction.origin,
        messages=interaction.messages,
        reply=interaction.reply,
        tokens=rendered.tokens,
        trained_from=rendered.trained_from,
        group=interaction.group,
        session=interaction.session,
        duration_ms=interaction.duration_ms,
    )


def _find_reason_to_drop(row: Row, settings: DataSettings) -> str | None:
    if len(row.tokens) > settings.max_tokens:
        return f"overlong: {len(row.tokens)} tokens, data.max_tokens is {settings.max_tokens}"
    if row.trained_from >= len(row.tokens):
        return "nothing to train on: the template leaves no token of the reply"
    return None
