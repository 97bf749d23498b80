"""docs/settings.md is what the settings say, and a key of another tool is answered with ours."""

import importlib.util
from pathlib import Path

import pytest

from graftwork.project.load import load_settings
from graftwork.project.other_tools import OTHER_NAMES
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import UserError

ROOT = Path(__file__).parents[3]
START = "project: x\ndata:\n  logs: [a.jsonl]\n"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "tools" / "settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_what_the_settings_say(generator):
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == generator.render(), "run: python tools/settings_page.py"


def test_every_setting_with_other_names_exists(generator):
    schema = ProjectSettings.model_json_schema()
    paths = {path.removesuffix("[]") for path, _ in generator.list_leaves(schema, schema["$defs"])}
    paths |= {path.partition("[")[0] for path in paths}
    assert {ours.partition(":")[0] for ours in OTHER_NAMES} <= paths
    for ours, names in OTHER_NAMES.items():
        assert any(names), ours


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ("per_device_train_batch_size: 4", "`per_device_train_batch_size` is `train.batch_size` here"),
        ("num_train_epochs: 3", "`num_train_epochs` is `train.epochs` here"),
        ("load_in_4bit: true", "`load_in_4bit` is `train.method: qlora` here"),
        ("cutoff_len: 512", "`cutoff_len` is `data.max_tokens` here"),
        ("beta: 0.1", "`beta` is `train.preferences.beta` or `train.policy.kl` here"),
        ("batch_sise: 4", "did you mean 'train.batch_size'?"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours(tmp_path, more, fix):
    path = tmp_path / "graft.yaml"
    path.write_text(f"{START}train:\n  {more}\n")
    with pytest.raises(UserError) as caught:
        load_settings(path)
    assert caught.value.fix == fix
    assert caught.value.where == f"{path}:5"
