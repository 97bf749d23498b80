"""Entry points of installed packages: found by name, imported on use, refused with the package's name."""

from importlib import metadata

import pytest

from graftwork.process import extensions
from graftwork.records.errors import EnvironmentFailure, UserError

GROUP = "graftwork.formats"


@pytest.fixture
def declare(monkeypatch):
    """Declare entry points as installed packages would."""

    def declare(**values):
        points = metadata.EntryPoints(metadata.EntryPoint(n, v, GROUP) for n, v in values.items())
        monkeypatch.setattr(extensions.metadata, "entry_points", points.select)

    return declare


def test_extension_names_lists_names_without_importing(declare):
    declare(zebra="no.such.module:Zebra", alpaca2="no.such.module:Two")
    assert extensions.extension_names(GROUP) == ["alpaca2", "zebra"]


def test_load_extension_returns_the_declared_object(declare):
    declare(decimal="decimal:Decimal")
    assert extensions.load_extension(GROUP, "decimal", attributes=["quantize"]).__name__ == "Decimal"


def test_unknown_extension_names_the_known_ones(declare):
    declare(decimal="decimal:Decimal")
    with pytest.raises(UserError, match="unknown format: 'decimla'") as error:
        extensions.load_extension(GROUP, "decimla")
    assert "decimal" in error.value.why


def test_extension_that_cannot_be_imported_names_its_declaration(declare):
    declare(broken="no.such.module:Thing")
    with pytest.raises(EnvironmentFailure, match="cannot be imported") as error:
        extensions.load_extension(GROUP, "broken")
    assert "no.such.module:Thing" in error.value.why


def test_extension_without_required_attributes_is_refused(declare):
    declare(decimal="decimal:Decimal")
    with pytest.raises(EnvironmentFailure, match="has no read_rows"):
        extensions.load_extension(GROUP, "decimal", attributes=["read_rows"])


def test_name_that_two_packages_declare_is_refused(monkeypatch):
    points = metadata.EntryPoints(
        [metadata.EntryPoint("x", "decimal:Decimal", GROUP), metadata.EntryPoint("x", "fractions:F", GROUP)]
    )
    monkeypatch.setattr(extensions.metadata, "entry_points", points.select)
    with pytest.raises(UserError, match="several packages"):
        extensions.load_extension(GROUP, "x")
