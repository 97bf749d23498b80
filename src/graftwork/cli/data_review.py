"""`graft data review` and `graft data corrections`: people look at rows and correct answers."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from graftwork.cli.command import Folder, opened
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.pipeline.review import ReviewQueue
    from graftwork.records.correction import ReviewAction, ReviewItem

KEYS: "dict[str, ReviewAction]" = {"a": "accept", "r": "reject", "s": "skip", "e": "edit", "u": "undo"}
HELP = "[bold]a[/]ccept  [bold]r[/]eject  [bold]e[/]dit  [bold]s[/]kip  [bold]u[/]ndo  [bold]q[/]uit"
LONGEST_SHOWN = 4000


def add_to(app: typer.Typer) -> None:
    app.command("review")(review)
    app.command("corrections")(corrections)


class ReviewTerminal(Protocol):
    """Where a reviewer looks and types. An empty key means that there is no more input."""

    def show(self, item: "ReviewItem", *, waiting: int) -> None: ...
    def say(self, text: str) -> None: ...
    def read_key(self) -> str: ...
    def edit(self, text: str) -> str | None: ...


def review(
    who: Annotated[
        str | None,
        typer.Option("--reviewer", help="Your id, stored with each decision. Default: the user name."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many items.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Log of reviewed rows. Default: reviewed.jsonl next to the first log."),
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Review captures, failed cases and doubtful rows, one at a time, the most useful first.

    Keys: a accept, r reject, e edit in $EDITOR, s skip, u undo, q quit. No row is shown twice. Decisions are
    stored at once and applied at the end. With --json the queue is printed instead.

    Example:  graft data review --reviewer ada --limit 20
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.pipeline.open_project import current_user
    from graftwork.pipeline.repair import is_in_logs
    from graftwork.pipeline.review import ReviewQueue, list_items

    with opened(project) as work:
        if json:
            items = list_items(work)
            print_json({"waiting": len(items), "items": [item.model_dump(mode="json") for item in items]})
            return
        queue = ReviewQueue(work, who=who or current_user())
        try:
            decided = run_review(queue, _ConsoleTerminal(), limit=limit)
        finally:
            # Also after Ctrl-C: what was decided holds.
            applied = queue.apply(out=out)
        print_line(stdout, f"{decided} decided, {queue.waiting} waiting; {applied.feedback} became feedback")
        if applied.file is not None:
            print_line(stdout, f"{applied.rows} rows corrected or rejected in {quote(applied.file)}")
            if not is_in_logs(work, applied.file):
                print_line(stdout, f"add {quote(applied.file)} to data.logs in graft.yaml to use them")


def run_review(queue: "ReviewQueue", terminal: ReviewTerminal, *, limit: int | None = None) -> int:
    """Show item after item until the queue is empty, the limit is reached or the reviewer quits."""
    decided = 0
    while limit is None or decided < limit:
        item = queue.next()
        if item is None:
            terminal.say("nothing is waiting for a review")
            break
        terminal.show(item, waiting=queue.waiting)
        key = terminal.read_key()
        if key in ("", "q", "\x03", "\x04"):
            break
        action = KEYS.get(key.lower())
        if action is None:
            terminal.say(HELP)
        elif action == "undo":
            undone = queue.undo()
            decided -= undone is not None
            terminal.say("taken back" if undone is not None else "nothing to take back")
        else:
            decided += _decide(queue, terminal, item, action)
    return decided


def _decide(
    queue: "ReviewQueue", terminal: ReviewTerminal, item: "ReviewItem", action: "ReviewAction"
) -> bool:
    reply = terminal.edit(item.reply) if action == "edit" else None
    if action == "edit" and (reply is None or not reply.strip() or reply.strip() == item.reply.strip()):
        terminal.say("not changed; press a to accept the reply as it is")
        return False
    kept = queue.decide(item, action, reply=reply)
    if not kept:
        terminal.say("another reviewer has decided about it")
    return kept


class _ConsoleTerminal:
    """The terminal of the user; lines of standard input where that is no terminal."""

    def show(self, item: "ReviewItem", *, waiting: int) -> None:
        from graftwork.cli.output import stdout
        from graftwork.cli.show.tables import print_line, quote

        where = str(item.origin) if item.origin is not None else f"capture {item.capture}"
        role = f" · {item.group}" if item.group else ""
        stdout.rule()
        times = f", {len(item.alike) + 1} times" if item.alike else ""
        print_line(stdout, f"[bold]{quote(where)}[/]{quote(role)}{times} [dim]({waiting} waiting)[/]")
        for reason, sentence in item.reasons.items():
            print_line(stdout, f"[yellow]{reason}[/]: {quote(sentence)}")
        for turn in item.messages:
            print_line(stdout, f"[cyan]{turn.role}[/]: {quote(_shorten(turn.content))}")
        print_line(stdout, f"[green]reply[/]: {quote(_shorten(item.reply))}")
        if item.other:
            print_line(stdout, f"[magenta]compare[/]: {quote(_shorten(item.other))}")
        print_line(stdout, HELP)

    def say(self, text: str) -> None:
        from graftwork.cli.output import stdout
        from graftwork.cli.show.tables import print_line

        print_line(stdout, text)

    def read_key(self) -> str:
        return _read_terminal_key() if sys.stdin.isatty() else _read_plain_key(sys.stdin.read)

    def edit(self, text: str) -> str | None:
        """The text as the user left it in $VISUAL or $EDITOR; None where the editor failed."""
        from graftwork.cli.show.tables import quote

        with tempfile.TemporaryDirectory(prefix="graft-review-") as folder:
            path = Path(folder) / "reply.txt"
            path.write_text(text)
            editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
            try:
                done = subprocess.run([*shlex.split(editor), str(path)], check=False)
            except (OSError, ValueError) as error:
                self.say(f"{quote(editor)} does not start ({type(error).__name__}); set $EDITOR")
                return None
            return path.read_text().removesuffix("\n") if done.returncode == 0 else None


def _read_terminal_key() -> str:
    """One key without Enter. Keys that were pressed before are kept, which `typer.getchar` does not do."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        return os.read(terminal, 1).decode(errors="replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read_plain_key(read: Callable[[int], str]) -> str:
    while (key := read(1)).isspace():
        pass
    return key


def _shorten(text: str) -> str:
    bare = text.strip()
    if len(bare) <= LONGEST_SHOWN:
        return bare
    half = LONGEST_SHOWN // 2
    return f"{bare[:half]}\n[… {len(bare) - LONGEST_SHOWN:,} characters …]\n{bare[-half:]}"


def corrections(
    labels: Annotated[
        Path | None, typer.Option("--labels", help="Write labels for judges as JSONL: answers with scores.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """List corrected answers with reviewer and time, and corrections that contradict each other.

    Example:  graft data corrections --labels labels.jsonl
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.disk import write_atomic
    from graftwork.pipeline.corrections import list_corrections, list_judge_labels
    from graftwork.text.wording import plural

    with opened(project) as work:
        found = list_corrections(work)
        if labels is not None:
            lines = [label.model_dump_json() + "\n" for label in list_judge_labels(work)]
            write_atomic(labels, "".join(lines), private=True)
    if json:
        print_json(found)
        return
    for correction in found.corrections:
        who = correction.reviewer or "unknown"
        print_line(
            stdout,
            f"{correction.at[:19]}  {quote(who)}  {correction.capture[:12]}  "
            f"{quote(_one_line(correction.served))} → {quote(_one_line(correction.corrected))}",
        )
    corrections, conflicts = len(found.corrections), len(found.conflicts)
    counted = f"{plural(corrections, 'correction')}, {plural(conflicts, 'conflict')}"
    print_line(stdout, counted)
    for conflict in found.conflicts:
        print_line(stdout, f"[yellow]conflict[/]: {quote(_one_line(conflict.question))}")
        for correction in conflict.corrections:
            who = quote(correction.reviewer or "unknown")
            print_line(stdout, f"  {who}, {correction.at[:19]}: {quote(_one_line(correction.corrected))}")


def _one_line(text: str, longest: int = 60) -> str:
    folded = " ".join(text.split())
    return folded if len(folded) <= longest else f"{folded[: longest - 1]}…"
