"""PEFT adapters and full weights: check their files, and import a PEFT folder from anywhere.

Input: the folder that training left. Output: its files with their hashes, or an error. Nothing is unpickled:
the weights must be safetensors by their content, not only by their name.
"""

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from graftwork.files.disk import explain_os_error, folder_digest
from graftwork.files.safetensors import header_length, read_header
from graftwork.records.base import MIB
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.report import Decision, Verdict
from graftwork.registry.manifest import ReleaseContext, describe_file, describe_text, name_release

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
        raise Corrupted(
            "the adapter folder does not hold an adapter and nothing else",
            why=f"it holds {', '.join(names) or 'nothing'}; a release takes {' and '.join(ADAPTER_FILES)}",
            fix="train again (`graft train`), or remove the other files",
            where=str(folder),
        )
    if folder_digest(folder) != expected_hash:
        raise Corrupted(
            "the adapter is not the one that the training run saved",
            why=f"its hash is not {expected_hash[:12]}…",
            fix="train again (`graft train`)",
            where=str(folder),
        )
    config, weights = files
    require_safetensors(folder / weights)
    key, kind = ("peft_type", "a PEFT adapter") if files == ADAPTER_FILES else ("model_type", "a model")
    try:
        stated = json.loads((folder / config).read_bytes())
        wrong = "" if isinstance(stated, dict) and key in stated else f"it has no {key}"
        what = f"{config} does not describe {kind}"
    except (ValueError, RecursionError) as error:
        wrong, what = str(error), f"{config} is not JSON"
    if wrong:
        raise Corrupted(what, why=wrong, fix="train again (`graft train`)", where=str(folder / config))
    return tuple(describe_file(folder / name) for name in files)


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


IMPORTED = "imported"
LARGEST_CONFIG = MIB
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


FindVerdict = Callable[[str], Verdict | None]
"""The earlier verdict on weights with this SHA-256, if there is one."""


def import_peft_folder(
    folder: Path,
    *,
    context: ReleaseContext,
    find_verdict: FindVerdict = lambda _sha256: None,
) -> tuple[Release, dict[str, Path | bytes], str, tuple[str, ...]]:
    """Check the folder and describe it as a release.

    Returns also its sources, the base in the adapter's own config, and the files that are not imported.
    An earlier refusal of the same weights stays in force; an approval does not: its evidence is missing.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise explain_os_error(error, folder) from error
    config = _read_config(folder / CONFIG, names)
    _require_weights(folder, names)
    files = tuple(describe_file(folder / name) for name in ADAPTER_FILES)
    earlier = find_verdict(files[ADAPTER_FILES.index(WEIGHTS)].sha256)
    decision: Decision = "not_enough_evidence"
    reason = "it was imported; nothing was measured here"
    if earlier is not None and earlier.decision in ("abort", "iterate"):
        decision = earlier.decision
        reason = f"it was imported; the same weights were judged here before: {earlier.reason}"
    verdict = Verdict(decision=decision, reason=reason, rules=(), report_hash="")
    named_base = str(config.get("base_model_name_or_path") or "")
    texts = {
        "README.md": _card(context, named_base=named_base, method=str(config["peft_type"])),
        "verdict.json": verdict.to_json(),
    }
    # The same as `folder_digest` of a folder with exactly these files.
    lines = (f"{file.path}\0{file.sha256}\n".encode() for file in sorted(files, key=lambda file: file.path))
    release = name_release(
        replace(context, settings={"origin": IMPORTED, "named_base": named_base}),
        files=(*files, *(describe_text(name, text) for name, text in texts.items())),
        verdict=verdict,
        run_id=IMPORTED,
        hashes={"adapter": hashlib.sha256(b"".join(lines)).hexdigest()},
    )
    sources: dict[str, Path | bytes] = {name: folder / name for name in ADAPTER_FILES}
    sources |= {name: text.encode() for name, text in texts.items()}
    return release, sources, named_base, tuple(sorted(set(names) - set(ADAPTER_FILES)))


def _read_config(path: Path, names: list[str]) -> dict[str, Any]:
    if CONFIG not in names or not _is_plain(path):
        raise UserError(
            "there is no adapter in this folder",
            why=f"a PEFT folder holds {CONFIG} and {WEIGHTS}",
            fix="specify the folder that holds these files; links are not followed",
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
    elif not wrong:
        try:
            f"{config['peft_type']}{config.get('base_model_name_or_path') or ''}".encode()
        except UnicodeEncodeError:
            wrong = "a text in it is not Unicode: it holds half a surrogate pair"
    if wrong:
        raise Corrupted(
            f"{CONFIG} does not describe a PEFT adapter",
            why=wrong,
            fix="write the adapter again with `save_pretrained`",
            where=str(path),
        )
    parsed: dict[str, Any] = config
    return parsed


def _require_weights(folder: Path, names: list[str]) -> None:
    if WEIGHTS not in names or not _is_plain(folder / WEIGHTS):
        pickled = sorted(name for name in names if name.endswith(_PICKLES))
        raise UserError(
            f"there is no {WEIGHTS} in this folder",
            why=f"{pickled[0]} is a pickle, which can run code when it is loaded"
            if pickled
            else "only safetensors are accepted, and links are not followed",
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
        raise Corrupted(
            f"{WEIGHTS} is incomplete",
            why="its header does not match the size of the file" if tensors else "it contains no weights",
            fix="copy the file again from where it was made",
            where=str(path),
        )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _card(context: ReleaseContext, *, named_base: str, method: str) -> str:
    # JSON strings are YAML strings, so the adapter's own config cannot break the header.
    base = json.dumps(context.base)
    stated = f"license: {json.dumps(context.licence)}\n" if context.licence else ""
    return (
        f"---\nbase_model: {base}\nlibrary_name: peft\n{stated}tags:\n- graftwork\n---\n\n"
        f"# {context.project}: an adapter that was imported\n\n"
        f"Method: {json.dumps(method)}. Base that the adapter names: {json.dumps(named_base)}. "
        "Where it comes from, what it was trained on and how good it is are not known: "
        "nothing was measured when it was imported.\n"
    )
