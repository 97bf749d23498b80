"""What an endpoint serves: leased before it is loaded, only what stands on its base, never damaged bytes."""

import asyncio
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from registry_samples import (
    BASE_PRINT,
    PROJECT,
    TEMPLATE_PRINT,
    dataset,
    outcome,
    parts,
    plan,
    publish_parts,
    write_adapter,
)

from graftwork.http.messages import ApiError
from graftwork.model.base import BaseFolder
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.registry import store as locks
from graftwork.registry.project import collect_garbage, open_store, promote_release, rollback_alias
from graftwork.serve import project as serving
from graftwork.serve.routing import FIRST_PAUSE, LONGEST_PAUSE, AliasWatcher
from graftwork.serve.settings import ServeSettings

OTHER = "o" * 64


class Listener(NullReporter):
    def __init__(self) -> None:
        self.words: list[str] = []

    def info(self, text: str) -> None:
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
    with use_project(open_project(tmp_path), Listener()) as opened:
        opened.__dict__["base"] = BaseFolder(name="small", folder="small", revision=BASE_PRINT, files={})
        yield opened


@pytest.fixture
def make(work, tmp_path):
    def make_one(
        name: str,
        *,
        model: str = "ufm",
        base: str = BASE_PRINT,
        template: str = TEMPLATE_PRINT,
        tool_template: str | None = None,
    ) -> str:
        adapter = write_adapter(tmp_path / "runs" / name, weights=name.encode())
        changes = {
            "base_fingerprint": base,
            "template_fingerprint": template,
            "tool_template": tool_template,
            "dataset": dataset().model_copy(
                update={"model": model, "base_fingerprint": base, "template_fingerprint": template}
            ),
            "plan": plan().model_copy(update={"base_fingerprint": base}),
            "outcome": outcome(adapter),
        }
        made = publish_parts(folder=open_store(work), index=work.releases, **{**parts(adapter), **changes})
        promote_release(work, made.id)
        return made.id

    return make_one


def test_specialists_on_the_same_base_are_served_and_others_are_left_out_in_words(work, make):
    main, same = make("main"), make("same", model="tagger")
    with open_store(work).lease() as held:
        assert set(serving.engine_job(work, held, ServeSettings()).adapters) == {main, same}
        other = make("other", model="tagger", base=OTHER)
        assert set(serving.engine_job(work, held, ServeSettings()).adapters) == {main}
        assert "tagger needs a different base" in work.reporter.words[-1]
        assert serving.AdapterFinder(work, held, TEMPLATE_PRINT, ServeSettings())(other) is None


def test_the_main_models_own_release_must_have_its_base(work, make):
    make("main", base=OTHER)
    with open_store(work).lease() as held, pytest.raises(UserError, match="a different base") as reported:
        serving.engine_job(work, held, ServeSettings())
    assert reported.value.fix


def test_a_release_of_another_chat_template_is_refused_by_name_and_the_old_one_stays(work, make, book):
    old = make("old")
    asyncio.run(book.refresh())
    new = make("new", template=OTHER)
    asyncio.run(book.refresh())
    assert book.routes.aliases == {"champion": old}
    assert new not in book.routes.releases
    assert book.routes.refused == {new: f"release {new[:12]} was trained with a different chat template"}
    with pytest.raises(ApiError, match="a different chat template"):
        replace(book.routes, aliases={}).resolve("champion")
    with open_store(work).lease() as held, pytest.raises(UserError, match="a different chat template"):
        serving.engine_job(work, held, ServeSettings())


def test_a_release_that_was_trained_with_another_form_of_calls_is_refused(work, make, monkeypatch):
    make("same", tool_template="tags")
    template = type("Template", (), {"template_fingerprint": TEMPLATE_PRINT, "tool_template": "tags"})
    monkeypatch.setattr(serving, "load_template", lambda _work: template)
    with open_store(work).lease() as held:
        assert serving.engine_job(work, held, ServeSettings()).adapters
        template.tool_template = None
        with pytest.raises(UserError, match="a different form of tool calls"):
            serving.engine_job(work, held, ServeSettings())


def test_a_served_release_is_kept_after_a_rollback_until_the_server_ends(work, make):
    make("first")
    second = make("second")
    with open_store(work).lease() as held:
        assert second in serving.engine_job(work, held, ServeSettings()).adapters
        rollback_alias(work)
        assert collect_garbage(work).releases == ()
    assert collect_garbage(work).releases == (second,)


class Engine:
    """An engine that loads whatever it is given."""

    def __init__(self) -> None:
        self.state, self.models = "ready", ["base"]

    async def load_adapter(self, name: str, folder: str, *, keep: object = ()) -> None:
        assert Path(folder).name == name
        self.models.append(name)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def book(work):
    """The aliases as a running endpoint follows them."""
    with open_store(work).lease() as held:
        yield AliasWatcher(
            Engine(),
            resolve_aliases=work.releases.aliases,
            find_adapter=serving.AdapterFinder(work, held, TEMPLATE_PRINT, ServeSettings()),
            clock=Clock(),
        )


def test_a_damaged_release_does_not_stop_the_rest_and_is_loaded_once_it_is_whole(work, make, book, caplog):
    damaged, whole = make("main"), make("same", model="tagger")
    path = open_store(work).folder(damaged) / "adapter_model.safetensors"
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(b"{}")
    for _ in range(5):
        asyncio.run(book.refresh())
    assert book.routes.aliases == {"tagger/champion": whole}
    # Reading every byte again each second would be a burden: it is put off.
    assert sum("does not match its hash" in record.getMessage() for record in caplog.records) == 1
    path.write_bytes(content)
    book._clock.now = LONGEST_PAUSE
    asyncio.run(book.refresh())
    assert book.routes.aliases == {"champion": damaged, "tagger/champion": whole}


def test_a_busy_store_while_an_alias_moves_does_not_refuse_the_release(work, make, book, monkeypatch):
    monkeypatch.setattr(locks, "shared_lock", functools.partial(locks.shared_lock, wait_seconds=0.01))
    old = make("old")
    asyncio.run(book.refresh())
    new = make("new")
    with locks.exclusive_lock(open_store(work).root):
        asyncio.run(book.refresh())
        assert (book.routes.aliases, book.routes.pending) == ({"champion": old}, {"champion": new})
    book._clock.now = FIRST_PAUSE
    asyncio.run(book.refresh())
    assert book.routes.aliases == {"champion": new}
