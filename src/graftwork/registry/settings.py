"""What a project may decide about its releases."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from graftwork.records.base import NotSecret, Record, SecretAddress
from graftwork.registry.manifest import NAME, RULE

_KEY_ITSELF = re.compile(r"\n|RW[A-Za-z0-9+/]{100}|-----BEGIN")
"""A key pasted in the place of its file, as minisign or OpenSSL writes it."""


class ReleaseSettings(Record):
    """The `release` part of graft.yaml."""

    alias: str = Field(default="champion", description="Alias that points at the live release.")
    public_key: Annotated[str, NotSecret("a public key")] | None = Field(
        default=None,
        description="A minisign public key, or a file with one: only releases signed with it are promoted, "
        "loaded and served.",
    )
    signing_key: Annotated[str, NotSecret("a path: the key itself is refused")] | None = Field(
        default=None,
        description="File with a minisign secret key to sign new releases with. Its password, if any, is "
        "read from GRAFT_SIGNING_PASSWORD.",
    )
    store: SecretAddress | None = Field(
        default=None,
        description="Store of releases at an fsspec URL: default for `push` and `pull`.",
    )
    keep_last: int = Field(
        default=10, ge=0, description="Number of newest releases of each model that garbage collection keeps."
    )
    keep_days: int = Field(
        default=30, ge=0, description="Garbage collection keeps releases younger than this many days."
    )

    @field_validator("signing_key")
    @classmethod
    def _validate_signing_key(cls, value: str | None) -> str | None:
        if value is not None and _KEY_ITSELF.search(value):
            raise ValueError(
                "this is the key itself: write it to a file that only you can read, and specify the file"
            )
        return value

    @field_validator("store")
    @classmethod
    def _store_holds_no_password(cls, store: str | None) -> str | None:
        if store is not None and urlsplit(store).password:
            raise ValueError(
                "a password in the address would be written into every release: put it where the store's "
                "own client looks for it, such as AWS_SECRET_ACCESS_KEY"
            )
        return store

    @field_validator("alias")
    @classmethod
    def _validate_alias(cls, alias: str) -> str:
        if not NAME.fullmatch(alias):
            raise ValueError(f"an alias is {RULE}; {alias!r} is not")
        return alias
