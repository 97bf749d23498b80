"""Subjects as a user names them.

In: a text of `--subject` or of `evaluate.subjects`. Out: what kind of subject is meant, and which. Does
not know whether it exists.

    base                                 the base model alone
    adapter                              what the last training of this model left
    adapter:FOLDER                       a PEFT folder
    run:ID                               the adapter of a run
    release:ID, release:ALIAS            a release; `champion` stands for `release:champion`
    log                                  the replies and durations that the log holds
    URL#model, URL#model,key=VARIABLE    an OpenAI-compatible endpoint; the key is in that variable,
                                         and `,concurrency=16` asks so many questions at a time
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from graftwork.records.errors import UserMistake
from graftwork.records.report import Endpoint
from graftwork.text.redact import is_variable_name

Kind = Literal["base", "adapter", "folder", "run", "release", "log", "endpoint"]
PLAIN: dict[str, Kind] = {"base": "base", "adapter": "adapter", "log": "log"}
CHAMPION = "champion"
MOST_AT_A_TIME = 256


class NamedSubject(NamedTuple):
    """`which` is a folder, a run, a release or an alias, as the kind has it."""

    name: str
    kind: Kind
    which: str = ""
    endpoint: Endpoint | None = None


def parse_subject(text: str) -> NamedSubject:
    said = text.strip()
    if said in PLAIN:
        return NamedSubject(said, PLAIN[said])
    if said == CHAMPION:
        return NamedSubject(said, "release", which=CHAMPION)
    if said.startswith(("http://", "https://")):
        return _parse_endpoint(said)
    before, colon, which = said.partition(":")
    kinds: dict[str, Kind] = {"adapter": "folder", "run": "run", "release": "release"}
    if colon and which and before in kinds:
        return NamedSubject(said, kinds[before], which=which)
    raise UserMistake(
        f"{text!r} is no subject",
        why="a subject is base, adapter, adapter:FOLDER, run:ID, release:ID, champion, log, or URL#model",
        fix="name one of these, for example `--subject release:champion`",
        where="--subject",
    )


def parse_subjects(texts: Iterable[str]) -> tuple[NamedSubject, ...]:
    """Each subject once, in the order in which they were first named."""
    return tuple({subject.name: subject for subject in map(parse_subject, texts)}.values())


def _parse_endpoint(said: str) -> NamedSubject:
    address, _, rest = said.partition("#")
    model, *options = rest.split(",")
    parts = urlsplit(address)
    if not parts.hostname or not model:
        raise _wrong(address, "it names a URL and, behind #, the model that is asked there")
    if parts.username or parts.password or parts.query:
        raise _wrong(address.split("@")[-1].split("?")[0], "a key in a URL would be written into the report")
    endpoint = Endpoint(url=address.rstrip("/"), model=model)
    for option in options:
        key, _, value = option.partition("=")
        if key == "key" and is_variable_name(value):
            endpoint = endpoint.model_copy(update={"key_variable": value})
        elif key == "concurrency" and value.isdigit() and 1 <= int(value) <= MOST_AT_A_TIME:
            endpoint = endpoint.model_copy(update={"concurrency": int(value)})
        else:
            # Not repeated: whoever mistook the key's place for the key would read it in a log.
            raise _wrong(
                f"{address}#{model}",
                f"behind the comma stands key=NAME_OF_A_VARIABLE or concurrency=1…{MOST_AT_A_TIME}",
            )
    return NamedSubject(f"{endpoint.url}#{model}", "endpoint", endpoint=endpoint)


def _wrong(said: str, why: str) -> UserMistake:
    return UserMistake(
        f"the endpoint {said} cannot be asked",
        why=why,
        fix="write it as https://host/v1#model,key=NAME_OF_THE_VARIABLE",
        where="--subject",
    )
