"""Releases written for other programs: a merged GGUF file with a Modelfile for Ollama, a folder for vLLM.

In: an open project and a release. Out: a new folder with `graftwork_export.json`. Base and adapter are
verified first. What was evaluated is base plus adapter in the embedded engine; notes name what changes.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Literal

from graftwork.engines.upstream_server import lora_rank
from graftwork.files.disk import atomic_folder, file_digest, write_atomic
from graftwork.model.base import copy_base, verify_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.gguf.cache import ADAPTER_FILES
from graftwork.model.gguf.modelfile import find_turn_texts, write_modelfile
from graftwork.model.gguf.writer import write_merged
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.records.release import GgufPrecision, Release
from graftwork.registry.index import find_release
from graftwork.registry.project import open_store

EXPORT_FILE = "graftwork_export.json"
ProgramFormat = Literal["ollama", "vllm"]


class ExportedRelease(Record):
    """What was written, and the command that uses it. `files` maps each file to its SHA-256."""

    release_id: str
    format: ProgramFormat
    folder: str
    command: str
    precision: str
    base_fingerprint: str
    adapter_hash: str
    files: dict[str, str]
    notes: tuple[str, ...] = ()


def export_for_program(
    work: OpenProject, name: str, *, format: ProgramFormat, to: Path, precision: GgufPrecision = "q8_0"
) -> ExportedRelease:
    """Write the release as `format` into the new folder `to`."""
    release = find_release(work.releases, name)
    if release.base_fingerprint != work.base.revision:
        raise UserMistake(
            f"release {release.id[:12]} was trained on another base than this project has now",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="export it from a project, or with a --model, that has this base",
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserMistake(
            f"{to} is not empty", why="nothing is overwritten", fix="name a new folder", where="--to"
        )
    if to.exists():
        to.rmdir()
    verify_base(work.base)
    with open_store(work).lease() as lease:
        lease.add(release.id)
        adapter = open_store(work).get(release.id)
        if format == "ollama":
            return _for_ollama(work, release, adapter, to, precision)
        return _for_vllm(work, release, adapter, to)


def _for_ollama(
    work: OpenProject, release: Release, adapter: Path, to: Path, precision: GgufPrecision
) -> ExportedRelease:
    base = Path(work.base.folder)
    template = ChatTemplate.from_folder(base, reasoning=work.settings.data.reasoning == "keep")
    model = f"{release.project}-{release.id[:12]}"
    notes = [
        f"the merged weights in {precision} were not evaluated: ask the held-out cases with "
        f"`graft eval --subject http://127.0.0.1:11434/v1#{model}`"
    ]
    if find_turn_texts(template) is None:
        notes.append(
            "the chat template could not be written in Ollama's language; compare a prompt before use"
        )
    with atomic_folder(to) as folder:
        write_merged(base, adapter, folder / f"{model}.gguf", precision=precision)
        write_atomic(folder / "Modelfile", write_modelfile(template, gguf=f"{model}.gguf"))
        return _finish(
            release,
            folder,
            to,
            format="ollama",
            command=f"ollama create {model} -f {shlex.quote(str(to / 'Modelfile'))}",
            precision=precision,
            notes=tuple(notes),
        )


def _for_vllm(work: OpenProject, release: Release, adapter: Path, to: Path) -> ExportedRelease:
    rank = lora_rank(adapter)
    if rank is None:
        raise UserMistake(
            f"release {release.id[:12]} is no adapter that vLLM can serve",
            why="vLLM applies plain LoRA adapters only",
            fix="export the merged weights: `graft release export run --format merged`",
        )
    name = f"{release.project}-{release.id[:12]}"
    command = [
        *("vllm", "serve", "base", "--enable-lora", "--max-lora-rank", str(rank)),
        *("--lora-modules", f"{name}=adapters/{name}", "--generation-config", "vllm", "--host", "127.0.0.1"),
    ]
    with atomic_folder(to) as folder:
        copy_base(work.base, folder / "base")
        (folder / "adapters" / name).mkdir(parents=True)
        for file in ADAPTER_FILES:
            shutil.copyfile(adapter / file, folder / "adapters" / name / file)
        line = shlex.join(command)
        write_atomic(folder / "serve.sh", f'#!/bin/sh\ncd "$(dirname "$0")" && exec {line} "$@"\n')
        note = f"ask for the model {name}; vLLM halves the precision of float32 files unless --dtype is given"
        return _finish(
            release, folder, to, format="vllm", command=f"sh {to / 'serve.sh'}", precision="", notes=(note,)
        )


def _finish(
    release: Release,
    folder: Path,
    to: Path,
    *,
    format: ProgramFormat,
    command: str,
    precision: str,
    notes: tuple[str, ...],
) -> ExportedRelease:
    files = {
        str(path.relative_to(folder)): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    exported = ExportedRelease(
        release_id=release.id,
        format=format,
        folder=str(to),
        command=command,
        precision=precision,
        base_fingerprint=release.base_fingerprint,
        adapter_hash=release.adapter_hash,
        files=files,
        notes=notes,
    )
    write_atomic(folder / EXPORT_FILE, json.dumps(exported.model_dump(mode="json"), indent=2) + "\n")
    return exported
