"""A PEFT folder from anywhere as a release that nobody has judged yet.

In: a folder that PEFT wrote, and the base that it is to be used with. Out: a manifest and its files. Nothing
is unpickled or executed: the weights are safetensors by their content or they are refused. Whether the
adapter belongs to that base, and whether it is any good, is not known here; so its verdict is "not enough
evidence", unless the same weights were refused before.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.files.digest import file_digest
from graftwork.files.whole import explain_os_error
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.units import MIB
from graftwork.records.verdict import Decision, Verdict
from graftwork.registry.adapter import ADAPTER_FILES, CONFIG, WEIGHTS, read_header
from graftwork.registry.release import FORMAT, name_by_content

IMPORTED = "imported"
LARGEST_CONFIG = MIB
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Ground(NamedTuple):
    """What the project says: where the adapter is to be used."""

    project: str
    model: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    tokenizer_fingerprint: str = ""
    licence: str | None = None


class Taken(NamedTuple):
    """`named_base` is what the adapter itself says it is for; `left` are files that were not taken."""

    release: Release
    sources: dict[str, Path | bytes]
    named_base: str
    left: tuple[str, ...]


FindVerdict = Callable[[str], Verdict | None]
"""What was decided here before about weights with this SHA-256, if anything was."""


def take_peft_folder(
    folder: Path,
    *,
    ground: Ground,
    created_at: str,
    versions: dict[str, str],
    find_verdict: FindVerdict = lambda _sha256: None,
) -> Taken:
    """Check the folder and describe it as a release."""
    names = _list(folder)
    config = _read_config(folder / CONFIG, names)
    _require_weights(folder, names)
    files = tuple(_describe(folder / name) for name in ADAPTER_FILES)
    weights = next(file.sha256 for file in files if file.path == WEIGHTS)
    verdict = _judge(find_verdict(weights))
    named_base = str(config.get("base_model_name_or_path") or "")
    texts = {
        "README.md": _card(ground, named_base=named_base, method=str(config["peft_type"])),
        "verdict.json": verdict.to_json(),
    }
    described = tuple(_describe_text(name, text) for name, text in texts.items())
    nameless = Release(
        id="",
        project=ground.project,
        base=ground.base,
        base_fingerprint=ground.base_fingerprint,
        template_fingerprint=ground.template_fingerprint,
        adapter_hash=_folder_hash(files),
        dataset_hash="",
        plan_hash="",
        report_hash="",
        verdict_hash=verdict.fingerprint(),
        decision=verdict.decision,
        run_id=IMPORTED,
        parent=None,
        created_at=created_at,
        files=tuple(sorted((*files, *described), key=lambda file: file.path)),
        settings={"origin": IMPORTED, "named_base": named_base},
        versions=versions,
        format=FORMAT,
        model=ground.model,
        tokenizer_fingerprint=ground.tokenizer_fingerprint,
        licence=ground.licence,
    )
    sources: dict[str, Path | bytes] = {name: folder / name for name in ADAPTER_FILES}
    return Taken(
        release=nameless.model_copy(update={"id": name_by_content(nameless)}),
        sources=sources | {name: text.encode() for name, text in texts.items()},
        named_base=named_base,
        left=tuple(sorted(set(names) - set(ADAPTER_FILES))),
    )


def _judge(known: Verdict | None) -> Verdict:
    """A refusal of the same weights holds on; a consent does not, for its evidence does not come along."""
    reason = "it was imported; nothing was measured here"
    decision: Decision = "not_enough_evidence"
    if known is not None and known.decision in ("abort", "iterate"):
        decision = known.decision
        reason = f"it was imported; the same weights were judged here before: {known.reason}"
    return Verdict(decision=decision, reason=reason, rules=(), report_hash="")


def _list(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        raise explain_os_error(error, folder) from error


def _read_config(path: Path, names: list[str]) -> dict[str, Any]:
    if CONFIG not in names or not _is_plain(path):
        raise UserMistake(
            "there is no adapter in this folder",
            why=f"a PEFT folder holds {CONFIG} and {WEIGHTS}",
            fix="name the folder that holds these files; links are not followed",
            where=str(path.parent),
        )
    wrong = ""
    config: Any = None
    if path.stat().st_size > LARGEST_CONFIG:
        wrong = f"it is larger than {LARGEST_CONFIG:,} bytes"
    else:
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            wrong = str(error)
        except RecursionError:
            wrong = "it is nested too deeply"
    if not wrong and (not isinstance(config, dict) or not isinstance(config.get("peft_type"), str)):
        wrong = "it has no peft_type"
    elif not wrong and not isinstance(config.get("base_model_name_or_path"), str | None):
        wrong = "base_model_name_or_path is not a text"
    elif not wrong and not _can_be_written(config["peft_type"], config.get("base_model_name_or_path") or ""):
        wrong = "a text in it is not Unicode: it holds half a surrogate pair"
    if wrong:
        raise Damaged(
            f"{CONFIG} does not describe a PEFT adapter",
            why=wrong,
            fix="write the adapter again with `save_pretrained`",
            where=str(path),
        )
    found: dict[str, Any] = config
    return found


def _can_be_written(*texts: str) -> bool:
    """JSON can spell what no encoding of Unicode can hold."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_weights(folder: Path, names: list[str]) -> None:
    if WEIGHTS not in names or not _is_plain(folder / WEIGHTS):
        pickled = sorted(name for name in names if name.endswith(_PICKLES))
        raise UserMistake(
            f"there is no {WEIGHTS} in this folder",
            why=f"{pickled[0]} is a pickle, which can run code when it is loaded"
            if pickled
            else "only safetensors are taken, and links are not followed",
            fix="write the adapter again with `save_pretrained(folder, safe_serialization=True)`",
            where=str(folder),
        )
    path = folder / WEIGHTS
    header = read_header(path)
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        end = -1
    if not tensors or 8 + length + end != path.stat().st_size:
        raise Damaged(
            f"{WEIGHTS} is not whole",
            why="its header tells of other bytes than the file has" if tensors else "it holds no weights",
            fix="copy the file again from where it was made",
            where=str(path),
        )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _describe(path: Path) -> ReleaseFile:
    return ReleaseFile(path=path.name, sha256=file_digest(path), size=path.stat().st_size)


def _describe_text(name: str, text: str) -> ReleaseFile:
    data = text.encode()
    return ReleaseFile(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _folder_hash(files: tuple[ReleaseFile, ...]) -> str:
    """As `folder_digest` has it for a folder with these files and no others."""
    lines = (f"{file.path}\0{file.sha256}\n".encode() for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _card(ground: Ground, *, named_base: str, method: str) -> str:
    # JSON strings are YAML strings: what the adapter says of itself cannot break the header.
    stated = f"license: {json.dumps(ground.licence)}\n" if ground.licence else ""
    return (
        f"---\nbase_model: {json.dumps(ground.base)}\nlibrary_name: peft\n{stated}tags:\n- graftwork\n---\n\n"
        f"# {ground.project}: an adapter that was imported\n\n"
        f"Method: {json.dumps(method)}. Base that the adapter names: {json.dumps(named_base)}. "
        "Where it comes from, what it was trained on and how good it is are not known: "
        "nothing was measured when it was imported.\n"
    )
