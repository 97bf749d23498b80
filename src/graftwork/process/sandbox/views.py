"""What the code sees of the machine: the interpreter, its libraries, four devices. Nothing else.

In: this interpreter. Out: a list of what is shown where, for every way alike: `folder` and `file` are
read-only, `device`, `link`, and `empty` for a folder whose content is withheld (packages that happen to be
installed beside the interpreter).
"""

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

FOLDER = "/box"
"""The code's own folder: its working directory, its home and its temporary folder."""
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class View(NamedTuple):
    kind: str
    source: str
    target: str


def interpreter() -> str:
    """The interpreter itself, not the link that a virtual environment has to it."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@lru_cache(maxsize=8)
def list_views(packages: tuple[str, ...] = ()) -> tuple[View, ...]:
    views = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            views.append(View("link", str(path.readlink()), name))
        elif path.is_dir():
            views.append(View("folder", name, name))
    folders = [Path(sys.base_prefix) / "lib", Path(sys.base_exec_prefix) / "lib"]
    folders.append(Path(sysconfig.get_path("stdlib")))
    views += _not_yet_seen(folders, views)
    views += _withheld(views)
    views.append(View("file", interpreter(), interpreter()))
    if Path("/etc/ld.so.cache").is_file():
        views.append(View("file", "/etc/ld.so.cache", "/etc/ld.so.cache"))
    views += [View("device", name, name) for name in _DEVICES if Path(name).exists()]
    views += [View("folder", source, shown) for source, shown in places_of(packages).items()]
    links = [place for place in ("/tmp", "/dev/shm") if not any(_lies_in(view, place) for view in views)]
    views += [View("link", FOLDER, place) for place in links]
    return tuple(dict.fromkeys(views))


def places_of(packages: tuple[str, ...]) -> dict[str, str]:
    """Where a folder of packages lies, and where it is seen: inside, its name tells nothing."""
    found = dict.fromkeys(str(Path(package).resolve()) for package in packages)
    return {source: f"/packages/{number}" for number, source in enumerate(found)}


def _lies_in(view: View, place: str) -> bool:
    """An interpreter may be installed in the temporary folder."""
    return Path(view.target).is_relative_to(place)


def _not_yet_seen(folders: list[Path], views: list[View]) -> list[View]:
    shown = [Path(view.target) for view in views if view.kind == "folder"]
    found: list[View] = []
    for folder in folders:
        path = folder.resolve()
        if path.is_dir() and not any(path.is_relative_to(above) for above in shown):
            shown.append(path)
            found.append(View("folder", str(path), str(path)))
    return found


def _withheld(views: list[View]) -> list[View]:
    """Installed packages, wherever they lie below a folder that is shown."""
    found = []
    for view in views:
        if view.kind == "folder":
            for pattern in ("python*/site-packages", "python*/dist-packages", "site-packages"):
                found += [View("empty", "", str(path)) for path in sorted(Path(view.source).glob(pattern))]
    return [view for view in found if not Path(view.target).is_symlink()]
