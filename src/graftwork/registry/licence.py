"""The licence of a base model, as its own files state it.

In: the folder of the base. Out: the name of the licence, or None where no file states one: it is never
guessed from the model's name. Reads the head of the model card, `config.json`, then a licence file.
"""

import json
import re
from pathlib import Path

_CARDS = ("README.md", "MODEL_CARD.md")
_TEXTS = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING")
_KNOWN = (
    ("apache license", "apache-2.0"),
    ("mit license", "mit"),
    ("gnu affero general public license", "agpl-3.0"),
    ("gnu lesser general public license", "lgpl-3.0"),
    ("gnu general public license", "gpl-3.0"),
    ("mozilla public license", "mpl-2.0"),
)
_LONGEST = 80
_MUCH = 65536


def find_licence(folder: Path) -> str | None:
    """What the first file that states a licence says."""
    for find in (_from_cards, _from_config, _from_texts):
        found = find(folder)
        if found:
            return found[:_LONGEST]
    return None


def _from_cards(folder: Path) -> str | None:
    for name in _CARDS:
        head = re.match(r"---\n(.*?)\n---", _read(folder / name), re.DOTALL)
        stated = dict(
            re.findall(r"^(license(?:_name)?):[ \t]*(\S[^\n]*)$", head[1] if head else "", re.MULTILINE)
        )
        licence = _plain(stated.get("license", ""))
        # "other" says that the name stands in the next key.
        named = _plain(stated.get("license_name", ""))
        if licence:
            return named if licence == "other" and named else licence
    return None


def _from_config(folder: Path) -> str | None:
    try:
        config = json.loads(_read(folder / "config.json") or "{}")
    except ValueError:
        return None
    stated = config.get("license") if isinstance(config, dict) else None
    return _plain(stated) if isinstance(stated, str) and stated.strip() else None


def _from_texts(folder: Path) -> str | None:
    for name in _TEXTS:
        text = _read(folder / name)
        beginning = " ".join(text[:2000].lower().split())
        for words, licence in _KNOWN:
            if words in beginning:
                return licence
        first = next((line.strip() for line in text.splitlines() if line.strip()), "")
        if first:
            return first
    return None


def _plain(value: str) -> str:
    return value.strip().strip("\"'").strip()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            return handle.read(_MUCH).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""
