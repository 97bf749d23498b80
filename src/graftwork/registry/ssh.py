"""A release over SSH to the machine that serves.

Input: a store, a release, `[user@]host:/folder`, an alias or none. Output: `<folder>/<id>/` there, its hashes
checked by that machine, and only then `<folder>/.aliases/<alias>` with the id in it. Needs ssh here, and a
POSIX shell, tar, sha256sum and a mv with -T (GNU, busybox) there; Graftwork need not be installed there.
Killed at any moment, the release is there whole or not at all, and the alias is the old or the new one.

GRAFT_SSH gives the command to use instead of `ssh`: `ssh -p 2222 -i key`.
"""

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

from graftwork.files.disk import file_digest
from graftwork.process.ssh import COMMAND, UNREACHED, ssh_command
from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.records.release import Release
from graftwork.registry.archive import write_archive
from graftwork.registry.folder import ProgressCallback, ProgressCounter, no_progress
from graftwork.registry.manifest import require_alias
from graftwork.registry.store import ReleaseStore

OTHER_BYTES = 44
POLL_SECONDS = 0.2
"""Seconds between two progress reports of a transfer."""
_TARGET = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.@%-]*):(?P<folder>/[^\0\r\n]*)")

# Each part gets: folder, id, alias, the list of hashes.
_HEAD = r"""set -eu
umask 022
root=$1 id=$2 alias=$3 sums=$4
signatures='manifest.json.minisig manifest.json.sigstore.json'
checked() { (cd -- "$1" && sha256sum -c - >/dev/null 2>&1); }
bare() {
  [ -d "$1" ] || return 1
  rest=$(printf '%s\n' "$sums" | grep -v -e ' manifest\.json\.minisig$' -e ' manifest\.json\.sigstore\.json$')
  count=$(printf '%s\n' "$rest" | wc -l)
  found=$(ls -A -- "$1" | grep -c -v -x -e 'manifest\.json\.minisig' -e 'manifest\.json\.sigstore\.json')
  [ "$count" -eq "$found" ] || return 1
  printf '%s\n' "$rest" | checked "$1"
}
# All that is sent, and nothing else; but it may be signed there though it is not here.
holds() { bare "$1" && printf '%s\n' "$sums" | checked "$1"; }
signed_the_same() { printf '%s\n' "$sums" | grep ' manifest\.json$' | checked "$1"; }
command -v sha256sum >/dev/null || { echo "there is no sha256sum on that machine" >&2; exit 45; }
"""
_HAVE = 'if holds "$root/$id"; then echo have; else echo need; fi\n'
_TAKE = r"""mkdir -p -- "$root"
part="$root/.$id.$$.part"
trap 'rm -rf -- "$part"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -- "$part"
tar -x -o -f - -C "$part"
holds "$part/$id" || { echo "it did not arrive as it was sent" >&2; exit 44; }
sync
if [ -e "$root/$id" ]; then
  holds "$root/$id" && exit 0
  # A complete release may lack only signatures: these come one by one, and it stays in place.
  # Copies of them: if it is damaged after all, what takes its place is signed.
  if bare "$root/$id"; then
    for name in $signatures; do
      if [ -e "$part/$id/$name" ]; then cp -p -- "$part/$id/$name" "$part/$name"; fi
    done
    sync
    for name in $signatures; do
      if [ -e "$part/$name" ]; then mv -f -- "$part/$name" "$root/$id/$name"; fi
    done
    sync
    holds "$root/$id" && exit 0
  fi
  # The folder of that name is damaged: move it away. Signatures of the same manifest stay valid.
  if signed_the_same "$root/$id"; then
    for name in $signatures; do
      if [ -f "$root/$id/$name" ] && [ ! -e "$part/$id/$name" ]; then
        cp -p -- "$root/$id/$name" "$part/$id/$name"
      fi
    done
    sync
  fi
  mv -T -- "$root/$id" "$part/damaged"
fi
mv -T -- "$part/$id" "$root/$id" 2>/dev/null || holds "$root/$id" || exit 44
sync
"""
_POINT = r"""holds "$root/$id" || { echo "it is not there whole" >&2; exit 44; }
file="$root/.aliases/$alias"
trap 'rm -f -- "$file.$$.part"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p -- "${file%/*}"
previous=$(cat -- "$file" 2>/dev/null || echo none)
if [ "$previous" != "$id" ]; then
  printf '%s\n' "$id" > "$file.$$.part"
  sync
  mv -f -- "$file.$$.part" "$file"
  printf '%s %s %s %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$alias" "$previous" "$id" >> "$root/.aliases/.log"
fi
echo "$previous"
"""


class SshTarget(NamedTuple):
    host: str
    folder: str


class SshDelivery(NamedTuple):
    """`sent` is false if the machine had the release; `previous` is where the alias there pointed."""

    release: Release
    sent: bool
    alias: str | None
    previous: str | None


def parse_target(text: str) -> SshTarget:
    """Parse `[user@]host:/folder`. The result cannot be read as an option or a second command."""
    match = _TARGET.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text[:80]!r} does not name a folder on a machine",
            why="the folder begins with a slash",
            fix="write it like host:/srv/releases or user@host:/srv/releases",
            where="--ssh",
        )
    return SshTarget(match["host"], match["folder"].rstrip("/") or "/")


def push_over_ssh(
    store: ReleaseStore,
    release_id: str,
    *,
    target: SshTarget,
    alias: str | None = None,
    progress: ProgressCallback = no_progress,
) -> SshDelivery:
    """Send the release unless the machine has it, check it there, then move the alias there."""
    if alias is not None:
        require_alias(alias)
    with store.shared_lock():
        release, folder = store.verify(release_id, progress=progress), store.folder(release_id)
        # The hashes in the manifest, not those of the folder, which may have changed since.
        hashes = {file.path: file.sha256 for file in release.files}
        names = [path.name for path in sorted(folder.iterdir())]
        sums = "\n".join(f"{hashes.get(name) or file_digest(folder / name)}  {name}" for name in names)
        arguments = (target.folder, release.id, alias or "", sums)
        sent = _run(target, _HAVE, arguments) != "have"
        if sent:
            with tempfile.TemporaryDirectory() as scratch:
                archive = Path(scratch) / "release.tar"
                write_archive(store, release_id, target=archive, progress=progress)
                with archive.open("rb") as stream:
                    count = ProgressCounter(progress, "send", archive.stat().st_size)
                    _run(target, _TAKE, arguments, stream=stream, count=count)
                    count.finish()
        previous = None
        if alias is not None:
            pointed_at = _run(target, _POINT, arguments)
            previous = None if pointed_at == "none" else pointed_at
    return SshDelivery(release, sent, alias, previous)


def _run(
    target: SshTarget,
    script: str,
    arguments: tuple[str, ...],
    *,
    stream: IO[bytes] | None = None,
    count: ProgressCounter | None = None,
) -> str:
    remote = " ".join(("sh", "-c", shlex.quote(_HEAD + script), "sh", *map(shlex.quote, arguments)))
    command = ssh_command()
    try:
        process = subprocess.Popen(
            [*command, target.host, remote],
            stdin=stream or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise EnvironmentFailure(
            f"{command[0]} cannot be started", why=str(error.strerror), fix="install an SSH client"
        ) from error
    with process:
        try:
            output, errors = None, b""
            while output is None:
                try:
                    output, errors = process.communicate(timeout=POLL_SECONDS if count is not None else None)
                except subprocess.TimeoutExpired:
                    # ssh reads from our file descriptor, whose position is the progress.
                    if count is not None and stream is not None:
                        count.reach(os.lseek(stream.fileno(), 0, os.SEEK_CUR))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _explain(process.returncode, errors.decode(errors="replace"), target)
    return output.decode(errors="replace").strip()


def _explain(code: int, errors: str, target: SshTarget) -> GraftError:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no output")[:300]
    where = f"{target.host}:{target.folder}"
    if code == OTHER_BYTES:
        return Corrupted(
            last, why="its hashes are not those of the release", fix="push it again", where=where
        )
    if code == UNREACHED:
        return EnvironmentFailure(
            f"{target.host} cannot be reached: {last}",
            why="ssh could not log in there without a prompt",
            fix=f"make `ssh {target.host} true` work without a password; {COMMAND} may set options",
            where=where,
        )
    return EnvironmentFailure(
        f"{target.host} refused it: {last}",
        why=f"the command there ended with {code}; the alias was not moved",
        fix="make sure that the folder there is writable, then push again",
        where=where,
    )
