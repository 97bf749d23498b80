"""A model says what it does otherwise; everything else is the project's, and all of it is checked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.project.load import load_settings
from graftwork.project.settings import ProjectSettings, merge, part_of
from graftwork.records.errors import UserError
from graftwork.train.settings import TrainSettings

HEAD = "project: p\ndata: {logs: [a.jsonl]}\n"
CHANGES = {
    "rank": st.integers(1, 64),
    "epochs": st.integers(1, 9),
    "target_modules": st.just(("q_proj",)),
    "upper_layers": st.none() | st.integers(1, 8),
    "seed": st.integers(0, 99),
    "watch": st.fixed_dictionaries({}, optional={"spike": st.floats(2, 9), "window": st.integers(4, 9)}),
}
SOME = st.fixed_dictionaries({}, optional=CHANGES)


def settings_of(tmp_path, text):
    path = tmp_path / "graft.yaml"
    path.write_text(HEAD + text)
    return load_settings(path)


@settings(deadline=None)
@given(below=SOME, above=SOME)
def test_a_part_over_the_whole_is_what_both_written_out_would_be(below, above):
    whole = TrainSettings.model_validate(below)
    merged = merge(whole, part_of(TrainSettings).model_validate(above))
    watch = {**below.get("watch", {}), **above.get("watch", {})}
    assert merged == TrainSettings.model_validate({**below, **above, "watch": watch})


def test_a_part_shows_only_what_was_given_and_survives_a_round_trip(tmp_path):
    settings = settings_of(tmp_path, "models: {main: {}, a: {train: {rank: 4, watch: {window: 9}}}}")
    shown = settings.model_dump(mode="json")["models"]["a"]["train"]
    assert shown == {"rank": 4, "watch": {"window": 9}}
    assert ProjectSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_each_model_has_the_projects_settings_but_for_its_own(tmp_path):
    settings = settings_of(
        tmp_path, "train: {rank: 4, seed: 5}\nmodels: {main: {}, a: {base: other, train: {rank: 2}}}"
    )
    assert (settings.of_model("main").train.rank, settings.of_model("main").base) == (4, settings.base)
    own = settings.of_model("a")
    assert (own.train.rank, own.train.seed, own.base) == (2, 5, "other")


def test_training_settings_do_not_change_the_inputs_of_a_dataset(tmp_path):
    plain = settings_of(tmp_path, "models: {main: {}, a: {replay: 0.1}}")
    other = settings_of(tmp_path, "models: {main: {}, a: {replay: 0.1, base: x, train: {rank: 2}}}")
    assert plain.all_models == other.all_models


def test_start_from_main_for_all_means_the_specialists(tmp_path):
    settings = settings_of(tmp_path, "train: {start_from: main}\nmodels: {first: {}, a: {}}")
    assert settings.of_model("first").train.start_from is None
    assert settings.of_model("a").train.start_from == "main"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {main: {}, a: {train: {rnk: 4}}}", "unknown key 'models.a.train.rnk'"),
        ("models: {main: {}, a: {train: {rank: 0}}}", "models.a.train.rank"),
        ("models: {main: {}, a: {train: {watch: {spike: 0}}}}", "models.a.train.watch.spike"),
        ("models: {main: {train: {start_from: main}}}", "cannot start from itself"),
        ("models: {main: {}, a: {base: b, train: {start_from: main}}}", "has a different base"),
    ],
)
def test_a_mistake_in_a_models_training_is_named_with_its_place(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        settings_of(tmp_path, text)
    assert words in caught.value.what
    assert caught.value.where.endswith(":3")


def test_a_misspelt_key_of_a_models_training_gets_the_nearest_one(tmp_path):
    with pytest.raises(UserError) as caught:
        settings_of(tmp_path, "models: {main: {}, a: {train: {epoch: 4}}}")
    assert "models.a.train.epochs" in caught.value.fix
