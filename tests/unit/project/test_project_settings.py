"""The models of a project: named, checked, and one of everything where none is named."""

import pytest

from graftwork.data.settings import ModelSettings
from graftwork.project.load import load_settings
from graftwork.project.settings import OneModel, ProjectSettings
from graftwork.project.upstream import start_with_upstream
from graftwork.records.errors import UserError

START = "project: p\ndata:\n  logs: [log.jsonl]\n"


@pytest.fixture
def load(tmp_path):
    def write_and_load(models):
        (tmp_path / "graft.yaml").write_text(START + models)
        return load_settings(tmp_path / "graft.yaml")

    return write_and_load


def test_without_models_there_is_one_with_every_row(load):
    settings = load("")
    assert settings.models == {}
    assert settings.main_model == "main"
    assert settings.all_models == {"main": ModelSettings()}


def test_the_first_model_named_is_the_main_one_and_the_order_stays(load):
    settings = load(
        "models:\n"
        "  wide: {}\n"
        "  coder:\n"
        "    keep: {role: [coder], domain: [python], stage: [1, 2]}\n"
        "    replay: 0.2\n"
        "    curriculum: true\n"
        "    weights: {coder: 2}\n"
        "    rl: 0.7\n"
        "  abc: {}\n"
    )
    assert settings.main_model == "wide"
    assert list(settings.all_models) == ["wide", "coder", "abc"]
    coder = settings.models["coder"]
    assert (coder.keep.role, coder.keep.domain, coder.keep.stage) == (("coder",), ("python",), (1, 2))
    assert (coder.replay, coder.curriculum, coder.weights, coder.rl) == (0.2, True, {"coder": 2.0}, 0.7)
    assert ProjectSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("models", "named", "line"),
    [
        ("models:\n  My Model: {}\n", "models.My Model", 5),
        ("models:\n  ../up: {}\n", "models.../up", 5),
        ("models:\n  7: {}\n", "models.7", 5),
        ("models:\n  a:\n    replay: 1\n", "models.a.replay", 6),
        ("models:\n  a:\n    rl: -0.1\n", "models.a.rl", 6),
        ("models:\n  a:\n    keep: {rolle: [x]}\n", "models.a.keep.rolle", 6),
        ("models:\n  a:\n    keep: {stage: [first]}\n", "models.a.keep.stage.0", 6),
        ("models:\n  a:\n    weights: {coder: often}\n", "models.a.weights.coder", 6),
        ("models:\n  a:\n", "models.a", 5),
        ("models: [a, b]\n", "models", 4),
        ("models:\n  a: {}\n  a: {}\n", "models.a", 6),
    ],
)
def test_a_mistake_in_models_is_named_by_its_key_and_line(load, models, named, line):
    with pytest.raises(UserError) as caught:
        load(models)
    assert named in caught.value.what
    assert caught.value.where.endswith(f"graft.yaml:{line}")
    assert caught.value.fix


def test_the_schema_shows_models_and_what_they_take():
    schema = ProjectSettings.model_json_schema()
    models = schema["properties"]["models"]
    assert models["description"]
    assert models["additionalProperties"] is False
    [(pattern, value)] = models["patternProperties"].items()
    assert pattern == schema["properties"]["project"]["pattern"]
    assert value == {"$ref": "#/$defs/OneModel"}
    assert set(schema["$defs"]["OneModel"]["properties"]) == set(OneModel.model_fields)


def test_a_switch_may_be_written_without_quotes(load):
    """YAML reads a plain `on` as true and a plain `off` as false."""
    settings = load("train: {fp8: off, compile: on, packing: auto, deterministic: true}\n").train
    assert (settings.fp8, settings.compile, settings.packing) == ("off", "on", "auto")
    assert settings.deterministic == "on"


def test_a_single_text_is_read_as_a_list_of_one(tmp_path):
    (tmp_path / "graft.yaml").write_text(
        "project: p\n"
        "data:\n  logs: logs/*.jsonl\n  keep_status: done\n"
        "models:\n  a:\n    keep: {role: coder, stage: [1]}\n"
    )
    settings = load_settings(tmp_path / "graft.yaml")
    assert (settings.data.logs, settings.data.keep_status) == (("logs/*.jsonl",), ("done",))
    assert settings.models["a"].keep.role == ("coder",)
    assert ProjectSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("data", "what", "fix", "line"),
    [
        (
            "  validation: 0.5\n  test: 0.6\n",
            "data: validation 0.5 and test 0.6 leave nothing",
            "change data.validation or data.test",
            4,
        ),
        ("  pack_tokens: 100\n", "data: pack_tokens 100", "change data.pack_tokens or data.max_tokens", 4),
        (
            "  seed: 1\n  mapping: {reply: x}\n",
            "data.mapping: a mapping names either",
            "give data.mapping.question or data.mapping.messages",
            5,
        ),
        ("evaluate:\n  metrics: []\n", "evaluate.metrics: specify at least one metric", "", 5),
        ("gate:\n  rules: []\n", "gate", "", 5),
        ("models: {a: {keep: {role: {x: y}}}}\n", "models.a.keep.role", "", 4),
    ],
)
def test_a_rule_about_several_keys_is_reported_with_its_keys_and_never_with_all_settings(
    load, data, what, fix, line
):
    with pytest.raises(UserError) as caught:
        load(data)
    assert what in caught.value.what
    assert "{" not in caught.value.what
    assert "Value error" not in caught.value.what
    assert fix in caught.value.fix
    assert "description" not in caught.value.fix
    assert caught.value.fix
    assert caught.value.where.endswith(f":{line}")


REWARDED = "objective: grpo, rewards: [{metric: task_success}]"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("train: {rollouts: {steps: 3}}\n", "train.rollouts"),
        ("train: {objective: dpo, rewards: [{metric: task_success}]}\n", "train.rewards"),
        ("train: {objective: dpo, mix: {sft: 0.3}}\n", "train.mix"),
        ("train: {" + REWARDED + ", preferences: {beta: 0.2}}\n", "train.preferences"),
        ("models:\n  a: {train: {policy: {kl: 0.1}}}\n", "models.a.train.policy"),
    ],
)
def test_a_setting_of_another_objective_is_refused_by_its_key(load, settings, named):
    with pytest.raises(UserError) as caught:
        load(settings)
    assert named in str(caught.value)


def test_a_setting_for_all_models_stays_where_one_of_them_uses_it(load):
    settings = load("train: {" + REWARDED + "}\nmodels:\n  a: {}\n  b: {train: {objective: sft}}\n")
    assert settings.of_model("b").train.objective == "sft"
    shared = "train: {rewards: [{metric: task_success}]}\nmodels:\n  a: {}\n  b: {train: {objective: grpo}}\n"
    assert load(shared).of_model("b").train.rewards


@pytest.mark.parametrize(
    ("url", "model", "named"),
    [("ftp://host/v1", "gpt-4o", "http://"), ("http://host/v1", "base", "another model")],
)
def test_an_upstream_that_cannot_be_served_leaves_no_file_behind(tmp_path, url, model, named):
    with pytest.raises(UserError, match=named):
        start_with_upstream(tmp_path, url=url, model=model, api_key_env=None)
    assert start_with_upstream(tmp_path, url="http://host/v1", model="gpt-4o", api_key_env=None)
