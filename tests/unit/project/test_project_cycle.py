"""The `cycle` section of graft.yaml: one line where one will do, and mistakes with their fix."""

import pytest

from graftwork.project.load import load_settings
from graftwork.records.errors import UserError

HEAD = "project: small\ndata: {logs: [logs/*.jsonl]}\n"


def load(tmp_path, text):
    path = tmp_path / "graft.yaml"
    path.write_text(HEAD + text)
    return load_settings(path)


def test_a_serving_machine_is_one_line(tmp_path):
    cycle = load(tmp_path, "cycle: {deliver: gpu1:/srv/helpdesk}").cycle
    assert [target.to for target in cycle.deliver] == ["gpu1:/srv/helpdesk"]
    several = load(tmp_path, "cycle: {deliver: [here, {to: gpu1:/srv/helpdesk}]}").cycle
    assert [target.to for target in several.deliver] == ["here", "gpu1:/srv/helpdesk"]


def test_without_the_section_nothing_begins_by_itself(tmp_path):
    cycle = load(tmp_path, "").cycle
    assert cycle.schedule is None
    assert not cycle.when.is_set
    assert cycle.deliver == ()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("cycle: {schedule: 0 25 * * *}", "hour must be 0 to 23"),
        ("cycle: {timezone: Europe/Atlantis}", "is not a time zone"),
        ("cycle: {approve: [promot]}", "there is no step 'promot'"),
        ("cycle: {models: [mian]}", "did you mean main"),
        ("cycle: {canary: {minutes: 5}}", "set serve.split"),
        ("cycle: {collect: captured.jsonl}", "matches none of data.logs"),
        ("cycle: {shedule: '@daily'}", "unknown key"),
        ("cycle: {notify: {kinds: [gates]}}", "cycle.notify.kinds"),
    ],
)
def test_a_mistake_names_its_key(tmp_path, text, what):
    with pytest.raises(UserError) as mistake:
        load(tmp_path, text)
    assert what in f"{mistake.value.what} {mistake.value.fix}"


def test_the_cycle_is_no_part_of_a_release(tmp_path):
    settings = load(tmp_path, "cycle: {schedule: '@daily'}")
    assert "cycle" not in settings.model_dump()
