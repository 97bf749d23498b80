"""What a project may decide about its releases."""

from pydantic import Field, field_validator

from graftwork.records.base import Record
from graftwork.registry.names import NAME, RULE


class ReleaseSettings(Record):
    """The `release` part of graft.yaml."""

    alias: str = Field(default="champion", description="The alias that points at the release that is live.")
    require_verdict: bool = Field(
        default=True,
        description="Promote only what the verdict clears to deploy, unless forced with a reason.",
    )

    @field_validator("alias")
    @classmethod
    def _alias_is_a_name(cls, alias: str) -> str:
        if not NAME.fullmatch(alias):
            raise ValueError(f"an alias is {RULE}; {alias!r} is not")
        return alias
