"""What an endpoint serves: leased before it is loaded, only what stands on its base, never damaged bytes."""

import pytest
import yaml
from registry_samples import BASE_PRINT, PROJECT, TEMPLATE_PRINT, dataset, outcome, parts, plan, write_adapter

from graftwork.coordinate import serving
from graftwork.coordinate.narrator import Silent
from graftwork.coordinate.release_gc import collect_garbage
from graftwork.coordinate.release_store import open_store, promote_release, rollback_alias
from graftwork.coordinate.workplace import open_workplace
from graftwork.model.base import Base
from graftwork.project.folder import open_project
from graftwork.records.errors import UserMistake
from graftwork.registry.publish import publish

OTHER = "o" * 64


class Listener(Silent):
    def __init__(self) -> None:
        self.words: list[str] = []

    def word(self, text: str) -> None:
        self.words.append(text)


@pytest.fixture
def work(tmp_path, monkeypatch):
    settings = {
        "project": PROJECT,
        "data": {"logs": ["l"]},
        "models": {"ufm": {}, "tagger": {}},
        "release": {"keep_last": 0, "keep_days": 0},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    template = type("Template", (), {"template_fingerprint": TEMPLATE_PRINT})
    monkeypatch.setattr(serving, "load_template", lambda _work: template)
    with open_workplace(open_project(tmp_path), Listener()) as opened:
        opened.__dict__["base"] = Base(name="small", folder="small", revision=BASE_PRINT, files={})
        yield opened


@pytest.fixture
def make(work, tmp_path):
    def make_one(name: str, *, model: str = "ufm", base: str = BASE_PRINT) -> str:
        adapter = write_adapter(tmp_path / "runs" / name, weights=name.encode())
        changes = {
            "base_fingerprint": base,
            "dataset": dataset().model_copy(update={"model": model, "base_fingerprint": base}),
            "plan": plan().model_copy(update={"base_fingerprint": base}),
            "outcome": outcome(adapter),
        }
        made = publish(folder=open_store(work), index=work.releases, **{**parts(adapter), **changes})
        promote_release(work, made.id)
        return made.id

    return make_one


def test_specialists_on_the_same_base_are_served_and_others_are_left_out_in_words(work, make):
    main, same = make("main"), make("same", model="tagger")
    with open_store(work).lease() as held:
        assert set(serving.engine_job(work, held).adapters) == {main, same}
        other = make("other", model="tagger", base=OTHER)
        assert set(serving.engine_job(work, held).adapters) == {main}
        assert "tagger needs another base" in work.narrator.words[-1]
        assert serving._AdapterFinder(work, held, TEMPLATE_PRINT)(other) is None


def test_the_main_models_own_release_must_stand_on_its_base(work, make):
    make("main", base=OTHER)
    with open_store(work).lease() as held, pytest.raises(UserMistake, match="another base") as told:
        serving.engine_job(work, held)
    assert told.value.fix


def test_what_is_served_stays_after_a_rollback_until_the_server_ends(work, make):
    make("first")
    second = make("second")
    with open_store(work).lease() as held:
        assert second in serving.engine_job(work, held).adapters
        rollback_alias(work)
        assert collect_garbage(work).releases == ()
    assert collect_garbage(work).releases == (second,)


def test_a_damaged_release_is_not_loaded_and_does_not_stop_the_rest(work, make, caplog):
    release = make("main")
    path = open_store(work).folder(release) / "plan.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    with open_store(work).lease() as held:
        finder = serving._AdapterFinder(work, held, TEMPLATE_PRINT)
        assert finder(release) is None
        assert finder(release) is None
    assert sum("is not loaded" in record.getMessage() for record in caplog.records) == 1
