"""A conversation with a model at the terminal: its answers as they arrive, ratings and commands."""

import sys
from collections.abc import Callable
from typing import Any

from graftwork.cli.output import print_error, print_text, stderr, stdout
from graftwork.evaluate.chat import Chat, ChatAnswer
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Message, Role
from graftwork.records.report import Case
from graftwork.text.wording import duration
from graftwork.views.document import quote, safe
from graftwork.views.terminal import print_line
from graftwork.views.turns import CALL_TAG, show_call, show_turns, split_answer

HELP = (
    "+ or - and an optional note rates the last answer; /tool TEXT answers a tool call; /example N asks a "
    "held-out case; /new starts again; Ctrl-D ends"
)


def first_turns(prompt: str | None, system: str | None, case: Case | None) -> list[Message]:
    if case is not None:
        return list(case.messages)
    turns = [Message(role="system", content=system)] if system else []
    return turns if prompt is None else [*turns, Message(role="user", content=prompt)]


def answer_once(chat: Chat, messages: list[Message], case: Case | None) -> dict[str, Any]:
    answer = chat.ask(messages)
    text, calls = split_answer(answer.text)
    reference = {} if case is None else {"case": case.id, "reference": case.reference}
    return {
        **answer.model_dump(mode="json"),
        "text": text,
        "calls": [call._asdict() for call in calls],
        "messages": [message.model_dump() for message in messages],
        **reference,
    }


class TerminalChat:
    """A conversation at the terminal, or by lines of standard input."""

    def __init__(self, chat: Chat, system: str | None, read_example: Callable[[int], Case]) -> None:
        self._chat, self._system, self._read_example = chat, system, read_example
        self._turns = first_turns(None, system, None)
        self._answer: ChatAnswer | None = None

    def run(self, case: Case | None) -> None:
        print_line(stderr, f"[dim]{quote(self._chat.subject)} answers. {HELP}[/]", soft_wrap=True)
        if case is not None:
            self._ask_case(case)
        while (line := _read_line()) is not None:
            try:
                self._obey(line)
            except GraftError as error:
                # The conversation continues: another question may be answered.
                print_error(error, as_json=False)
            except KeyboardInterrupt:
                print_line(stderr, "[dim]stopped[/]")

    def ask(self, text: str, *, role: Role = "user") -> None:
        asked = [*self._turns, Message(role=role, content=text)]
        self._answer_turns(asked)

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in ("+", "-"):
            self._rate(good=word == "+", note=rest.strip())
        elif word == "/new":
            self._turns, self._answer = first_turns(None, self._system, None), None
        elif word == "/example" and rest.strip().isdecimal():
            self._ask_case(self._read_example(int(rest)))
        elif word == "/tool" and rest.strip():
            self.ask(rest.strip(), role="tool")
        elif word.startswith("/"):
            print_line(stderr, f"[dim]{quote(word)} is not a command here. {HELP}[/]", soft_wrap=True)
        elif line:
            self.ask(line)

    def _ask_case(self, case: Case) -> None:
        for turn in show_turns(case.messages):
            if turn.tools:
                print_line(stdout, f"[dim]tools[/] {quote(', '.join(turn.tools))}", soft_wrap=True)
            shown = "\n".join(filter(None, [turn.text, *(f"→ {call}" for call in turn.calls)]))
            if shown:
                print_line(stdout, f"[dim]{turn.role}[/] {quote(shown)}", soft_wrap=True)
        self._answer_turns(list(case.messages))
        reference, calls = split_answer(case.reference)
        shown = "\n".join(filter(None, [reference, *(f"→ {show_call(call)}" for call in calls)]))
        print_line(stdout, f"[dim]the log has[/] {quote(shown)}", soft_wrap=True)

    def _answer_turns(self, turns: list[Message]) -> None:
        stream = _TextBeforeCalls()
        self._answer = None
        answer = self._chat.ask(turns, on_text=stream.add)
        text, calls = split_answer(answer.text)
        stream.finish(text)
        for call in calls:
            print_text(safe(f"→ {show_call(call)}"))
        cut_off = ", cut off at --max-tokens" if answer.finish_reason == "length" else ""
        tokens = "" if answer.reply_tokens is None else f", {answer.reply_tokens} tokens"
        print_line(stderr, f"[dim]{duration(answer.seconds)}{tokens}{cut_off}[/]")
        self._turns = [*turns, Message(role="assistant", content=answer.text)]
        self._answer = answer

    def _rate(self, *, good: bool, note: str) -> None:
        if self._answer is None or self._answer.capture is None:
            why = "there is no answer yet" if self._answer is None else "serve.capture is off"
            print_line(stderr, f"[dim]nothing to rate: {why}[/]")
            return
        self._chat.rate(self._answer, 1.0 if good else 0.0, note)
        print_line(stderr, f"[dim]rated {'good' if good else 'bad'} (capture {self._answer.capture[:12]})[/]")


def _read_line() -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        return None


class _TextBeforeCalls:
    """Prints an answer as it arrives, up to its first call."""

    def __init__(self) -> None:
        self._text, self._printed = "", 0

    def add(self, piece: str) -> None:
        self._text += piece
        end = self._text.find(CALL_TAG)
        if end < 0:
            # The last characters may be the beginning of the tag.
            sizes = range(min(len(CALL_TAG) - 1, len(self._text)), 0, -1)
            held_back = next((size for size in sizes if self._text.endswith(CALL_TAG[:size])), 0)
            end = len(self._text) - held_back
        self._print(self._text[:end])

    def finish(self, text: str) -> None:
        """Print what is missing of the text."""
        self._print(text)
        if self._printed:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _print(self, text: str) -> None:
        if len(text) > self._printed:
            sys.stdout.write(safe(text[self._printed :]))
            sys.stdout.flush()
            self._printed = len(text)
