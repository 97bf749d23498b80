"""Engines of installed packages are opened by entry point and checked for what they must have."""

from importlib import metadata
from pathlib import Path

import pytest

from graftwork.engines.interface import EngineFacts, EngineSource
from graftwork.engines.local import agree_on_engine, open_engine
from graftwork.records.errors import EnvironmentFailure, UserError


class EchoEngine:
    adapters = ()

    def __init__(self, source):
        self.facts = EngineFacts("echo", source.precision, source.fingerprint, {})

    def render(self, messages): ...
    def answer(self, prompts, decoding, *, adapter=None, on_token=None): ...
    def time_one(self, prompt, decoding, *, adapter=None): ...
    def reply_losses(self, conversations, *, adapter=None): ...
    def load_adapter(self, name, folder): ...
    def peak_memory_gib(self): ...
    def close(self): ...


class HalfAnEngine:
    def __init__(self, source): ...


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    known = [
        metadata.EntryPoint(name, f"{__name__}:{value}", "graftwork.engines")
        for name, value in (("echo", "EchoEngine"), ("half", "HalfAnEngine"))
    ]

    def entry_points(*, group, name=None):
        return [
            extension for extension in known if group == extension.group and name in (None, extension.name)
        ]

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_an_engine_of_a_package_is_opened_with_what_it_shall_load(monkeypatch):
    monkeypatch.setenv("GRAFT_ENGINE", "echo")
    assert agree_on_engine() == "echo"
    engine = open_engine("echo 1.0", EngineSource(Path("base"), precision="float16", fingerprint="f"))
    assert engine.facts == EngineFacts("echo", "float16", "f", {})


def test_an_engine_that_lacks_a_method_is_refused():
    with pytest.raises(EnvironmentFailure, match="has no answer"):
        open_engine("half", EngineSource(Path("base")))


def test_an_unknown_engine_is_refused():
    with pytest.raises(UserError, match="unknown engine"):
        open_engine("nobody", EngineSource(Path("base")))
