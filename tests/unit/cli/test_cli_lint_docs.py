"""docs/answers/configurations.md shows what the command prints today, and names every rule."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from graftwork.cli.main import main
from graftwork.plan.lint.project import RULES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "answers" / "configurations.md").read_text()
BLOCKS = re.findall(r"```console\n\$ graft (plan lint [^\n]+)\n(.*?)\n```", PAGE, re.S)


def test_there_is_a_block_for_every_configuration_of_the_documents():
    shown = " ".join(command for command, _ in BLOCKS)
    assert all(file.name in shown for file in (ROOT / "tests" / "data" / "lint").iterdir())


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_the_command_prints(command, output, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["graft", *shlex.split(command)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.rstrip() == output


def test_every_rule_is_in_the_page():
    missing = [rule.id for rule in RULES if f"| `{rule.id}` | {rule.severity} |" not in PAGE]
    assert not missing
