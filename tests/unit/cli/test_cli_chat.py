"""A conversation at the terminal, whatever the model writes."""

from types import SimpleNamespace

import pytest

from graftwork.cli.conversation import TerminalChat
from graftwork.cli.output import print_error
from graftwork.evaluate.chat import ChatAnswer
from graftwork.records.errors import EnvironmentFailure
from graftwork.text.tool_calls import ToolCall, write_call

ESCAPE = "\x1b]0;title\x07"


@pytest.mark.parametrize("text", [f"a{ESCAPE}b", write_call(ToolCall(f"look{ESCAPE}", {"a": "\x9b2J"}))])
def test_no_control_character_of_a_model_reaches_the_terminal(text, capsys):
    chat = SimpleNamespace(subject="m", ask=lambda *_, **__: ChatAnswer(subject="m", text=text))
    TerminalChat(chat, None, lambda _number: None).ask("hello")
    shown = capsys.readouterr()
    assert "␛]0;title␇" in shown.out
    assert not {"\x1b", "\x07", "\x9b"} & {*shown.out, *shown.err}


def test_no_control_character_of_a_server_reaches_the_terminal(capsys):
    print_error(EnvironmentFailure(f"m{ESCAPE} did not answer", why=ESCAPE, fix="ask again"), as_json=False)
    assert capsys.readouterr().err.count("␛]0;title␇") == 2
