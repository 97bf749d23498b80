"""`graft serve`: what is asked on the command line goes over what graft.yaml says, or is refused by name."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from graftwork.cli.serve import app
from graftwork.records.errors import UserError
from graftwork.serve import project as serving
from graftwork.serve.settings import ServeSettings


def section_of(folder):
    return yaml.safe_load((folder / "graft.yaml").read_text())["serve"]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Run the command with options; the settings that the endpoint was to be started with."""
    seen = []

    def serve_here(work, settings, *, on_ready, revise):
        seen.append(settings)
        work.reporter.info("no router yet: graft train --router 0.95")
        assert revise(ServeSettings.model_validate(section_of(tmp_path))) == settings
        on_ready("u")

    monkeypatch.setattr(serving, "serve_here", serve_here)

    def ask(*options, section=None):
        settings = {"project": "p", "data": {"logs": ["x.jsonl"]}, "serve": section or {}}
        (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
        done = CliRunner().invoke(app, [*options, "-C", str(tmp_path)])
        if done.exception is not None:
            raise done.exception
        ask.stderr = done.stderr
        return seen[-1], done.stdout

    return ask


def test_remarks_of_the_start_are_shown_as_text_or_as_json(asked):
    _, out = asked()
    assert "no router yet" in asked.stderr
    assert "no router yet" not in out
    asked(section={"log_format": "json"})
    assert json.loads(asked.stderr)["message"] == "no router yet: graft train --router 0.95"


def test_serve_without_challenger_assigns_no_sessions(asked):
    settings, out = asked("--port", "0")
    assert (settings.split, settings.port) == (None, 0)
    assert "experiment" not in out


def test_a_reload_without_an_endpoint_says_how_to_start_one(tmp_path):
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p", "data": {"logs": ["x.jsonl"]}}))
    done = CliRunner().invoke(app, ["--reload", "-C", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "no endpoint of this project runs" in done.exception.what
    assert "graft serve" in done.exception.fix


def test_serve_takes_challenger_share_and_experiment_as_options(asked):
    settings, out = asked("--challenger", "next", "--share", "0.25", "--experiment", "spring")
    assert settings.split.model_dump() == {
        "alias": "champion",
        "challenger": "next",
        "share": 0.25,
        "experiment": "spring",
    }
    assert "champion answers everything" in out  # there is no release yet, and that is said


def test_serve_options_override_single_settings_of_graft_yaml(asked):
    section = {"split": {"alias": "main", "challenger": "next", "share": 0.5}}
    assert asked(section=section)[0].split.share == 0.5
    settings, _ = asked("--share", "0.2", section=section)
    assert (settings.split.alias, settings.split.challenger, settings.split.share) == ("main", "next", 0.2)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (("--share", "1"), "--share"),
        (("--share", "0"), "--share"),
        (("--challenger", "champion"), "--challenger"),
        (("--port", "99999"), "--port"),
    ],
)
def test_an_impossible_value_is_refused_with_its_option(asked, options, where):
    with pytest.raises(UserError) as refused:
        asked(*options)
    assert refused.value.where == where
    assert refused.value.fix
