"""PEFT adapters and full weights: check their files, and import a PEFT folder from anywhere.

In: the folder that training left. Out: its files with their hashes, or an error. Nothing is unpickled: the
weights must be safetensors by their content, not only by their name.
"""

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.files.disk import explain_os_error, file_digest, folder_digest
from graftwork.files.safetensors import header_length, read_header
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Decision, Verdict
from graftwork.records.units import MIB
from graftwork.registry.manifest import content_id

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ADAPTER_FILES = (CONFIG, WEIGHTS)
FULL_FILES = ("config.json", "model.safetensors")
"""The files of `method: full`: the weights of the whole model."""
GET_AGAIN = "train again (`graft train`), or get the file again from where it was made"


def inspect_adapter(folder: Path, *, expected_hash: str) -> tuple[ReleaseFile, ...]:
    """The files of a trained adapter, checked against the hash that training recorded."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise explain_os_error(error, folder) from error
    files = find_weight_files(folder)
    if names != list(files):
        raise Damaged(
            "the adapter folder does not hold an adapter and nothing else",
            why=f"it holds {', '.join(names) or 'nothing'}; a release takes {' and '.join(ADAPTER_FILES)}",
            fix="train again (`graft train`), or move what does not belong there away",
            where=str(folder),
        )
    if folder_digest(folder) != expected_hash:
        raise Damaged(
            "the adapter is not the one that the training run left",
            why=f"its hash is not {expected_hash[:12]}…",
            fix="train again (`graft train`)",
            where=str(folder),
        )
    config, weights = files
    require_safetensors(folder / weights)
    _require_config(folder / config, key="peft_type" if files == ADAPTER_FILES else "model_type")
    return tuple(
        ReleaseFile(path=name, sha256=file_digest(folder / name), size=(folder / name).stat().st_size)
        for name in files
    )


def find_weight_files(folder: Path) -> tuple[str, str]:
    """The names of config and weights in the folder that training left."""
    return choose_weight_files({path.name for path in folder.iterdir()})


def choose_weight_files(names: Collection[str]) -> tuple[str, str]:
    """The names of config and weights among these files: an adapter unless it is full weights."""
    full = all(name in names for name in FULL_FILES)
    return FULL_FILES if full and CONFIG not in names else ADAPTER_FILES


def require_safetensors(path: Path) -> None:
    """Raise if the file is not safetensors. A pickle can have any name."""
    read_header(path, fix=GET_AGAIN)


def _require_config(path: Path, *, key: str) -> None:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{path.name} is not JSON", why=str(error), fix="train again (`graft train`)", where=str(path)
        ) from error
    if not isinstance(config, dict) or key not in config:
        raise Damaged(
            f"{path.name} does not describe {'a PEFT adapter' if key == 'peft_type' else 'a model'}",
            why=f"it has no {key}",
            fix="train again (`graft train`)",
            where=str(path),
        )


IMPORTED = "imported"
LARGEST_CONFIG = MIB
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class AdapterTarget(NamedTuple):
    """The project and base model that an imported adapter is for."""

    project: str
    model: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    tokenizer_fingerprint: str = ""
    licence: str | None = None


class PeftImport(NamedTuple):
    """`named_base` is the base in the adapter's own config; `left` are files that were not imported."""

    release: Release
    sources: dict[str, Path | bytes]
    named_base: str
    left: tuple[str, ...]


FindVerdict = Callable[[str], Verdict | None]
"""The earlier verdict on weights with this SHA-256, if there is one."""


def import_peft_folder(
    folder: Path,
    *,
    target: AdapterTarget,
    created_at: str,
    versions: dict[str, str],
    find_verdict: FindVerdict = lambda _sha256: None,
) -> PeftImport:
    """Check the folder and describe it as a release."""
    names = _list(folder)
    config = _read_config(folder / CONFIG, names)
    _require_weights(folder, names)
    files = tuple(_describe(folder / name) for name in ADAPTER_FILES)
    weights = next(file.sha256 for file in files if file.path == WEIGHTS)
    verdict = _judge(find_verdict(weights))
    named_base = str(config.get("base_model_name_or_path") or "")
    texts = {
        "README.md": _card(target, named_base=named_base, method=str(config["peft_type"])),
        "verdict.json": verdict.to_json(),
    }
    described = tuple(describe_text(name, text) for name, text in texts.items())
    nameless = Release(
        id="",
        project=target.project,
        base=target.base,
        base_fingerprint=target.base_fingerprint,
        template_fingerprint=target.template_fingerprint,
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
        model=target.model,
        tokenizer_fingerprint=target.tokenizer_fingerprint,
        licence=target.licence,
    )
    sources: dict[str, Path | bytes] = {name: folder / name for name in ADAPTER_FILES}
    return PeftImport(
        release=nameless.model_copy(update={"id": content_id(nameless)}),
        sources=sources | {name: text.encode() for name, text in texts.items()},
        named_base=named_base,
        left=tuple(sorted(set(names) - set(ADAPTER_FILES))),
    )


def _judge(known: Verdict | None) -> Verdict:
    """An earlier refusal of the same weights stays in force; an approval does not, because its evidence is
    missing."""
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
    """JSON can contain half surrogate pairs, which cannot be encoded."""
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
    header, length = read_header(path, fix=GET_AGAIN), header_length(path)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        end = -1
    if not tensors or 8 + length + end != path.stat().st_size:
        raise Damaged(
            f"{WEIGHTS} is not whole",
            why="its header does not match the size of the file" if tensors else "it contains no weights",
            fix="copy the file again from where it was made",
            where=str(path),
        )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _describe(path: Path) -> ReleaseFile:
    return ReleaseFile(path=path.name, sha256=file_digest(path), size=path.stat().st_size)


def describe_text(name: str, text: str) -> ReleaseFile:
    data = text.encode()
    return ReleaseFile(path=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _folder_hash(files: tuple[ReleaseFile, ...]) -> str:
    """The same as `folder_digest` of a folder with exactly these files."""
    lines = (f"{file.path}\0{file.sha256}\n".encode() for file in sorted(files, key=lambda file: file.path))
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _card(target: AdapterTarget, *, named_base: str, method: str) -> str:
    # JSON strings are YAML strings, so the adapter's own config cannot break the header.
    stated = f"license: {json.dumps(target.licence)}\n" if target.licence else ""
    return (
        f"---\nbase_model: {json.dumps(target.base)}\nlibrary_name: peft\n{stated}tags:\n- graftwork\n---\n\n"
        f"# {target.project}: an adapter that was imported\n\n"
        f"Method: {json.dumps(method)}. Base that the adapter names: {json.dumps(named_base)}. "
        "Where it comes from, what it was trained on and how good it is are not known: "
        "nothing was measured when it was imported.\n"
    )
