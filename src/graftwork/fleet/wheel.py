"""This installation of graftwork as a wheel, so that a place runs the same code as this machine.

In: the package that is imported here. Out: a wheel with fixed times and order: the same sources give the same
bytes. Needs no build tools.
"""

import base64
import csv
import hashlib
import io
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

from graftwork.version import __version__

PACKAGE = Path(__file__).parents[1]
NAME = f"graftwork-{__version__}-py3-none-any.whl"
_INFO = f"graftwork-{__version__}.dist-info"
_TIME = (1980, 1, 1, 0, 0, 0)
_WHEEL = b"Wheel-Version: 1.0\nGenerator: graftwork\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_LEFT_OUT = {"__pycache__", ".DS_Store"}


def build_wheel(target: Path) -> Path:
    """Write the wheel into the folder `target`."""
    path = target / NAME
    path.write_bytes(_wheel())
    return path


@cache
def _wheel() -> bytes:
    """Built once a process."""
    content = {
        f"graftwork/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and not _LEFT_OUT.intersection(path.parts)
    }
    content |= {
        f"{_INFO}/METADATA": _metadata().encode(),
        f"{_INFO}/WHEEL": _WHEEL,
        f"{_INFO}/entry_points.txt": b"[console_scripts]\ngraft = graftwork.cli.main:main\n",
    }
    content[f"{_INFO}/RECORD"] = _record(content).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return buffer.getvalue()


def _metadata() -> str:
    """With the dependencies of the installed package; only the name where it was never installed."""
    try:
        installed = metadata.distribution("graftwork").read_text("METADATA")
    except metadata.PackageNotFoundError:
        installed = None
    lines = (installed or "Metadata-Version: 2.1\nName: graftwork\n").splitlines()
    head = lines[: lines.index("")] if "" in lines else lines
    kept = [line for line in head if not line.startswith("Version:")]
    return "\n".join([*kept, f"Version: {__version__}", ""])


def _record(content: dict[str, bytes]) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(data)))
    writer.writerow((f"{_INFO}/RECORD", "", ""))
    return table.getvalue()
