"""Keys and passwords do not get into messages or manifests."""

import pytest
from pydantic import ValidationError

from graftwork.records.errors import EnvironmentFailure
from graftwork.registry.hub import Hub
from graftwork.registry.settings import ReleaseSettings


def test_a_token_at_the_edge_of_a_cut_message_is_not_shown_in_part():
    hub = object.__new__(Hub)
    hub.repository, hub._token, hub._endpoint = "owner/name", "hf_" + "s3cret" * 10, None

    def ask() -> None:
        raise RuntimeError("x" * 270 + " " + hub._token)

    with pytest.raises(EnvironmentFailure) as caught:
        hub._call(ask)
    assert "s3cret" not in caught.value.what


def test_a_store_with_a_password_in_its_address_is_refused():
    with pytest.raises(ValidationError, match="every release"):
        ReleaseSettings(store="ftp://me:secret@host/releases")
    assert ReleaseSettings(store="s3://bucket/folder").store == "s3://bucket/folder"
