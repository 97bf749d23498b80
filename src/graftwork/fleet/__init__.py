"""Places that run a job.

To add a place, write a class with the methods of `fleet/place.py` (`fleet/local.py` is one) and either name
it in `BUILT_IN` below or declare it in an installed package:
`[project.entry-points."graftwork.places"] NAME = "module:Class"`. The class is called without arguments.
"""

from typing import cast

from graftwork.fleet.local import LocalPlace
from graftwork.fleet.place import Place
from graftwork.process.extensions import load_extension

BUILT_IN = {"local": LocalPlace}
REQUIRED = ("offer", "submit", "poll", "fetch", "stop", "list")


def open_place(name: str = "local") -> Place:
    """Return the place of this name: a built-in one, or one that an installed package adds."""
    kind = BUILT_IN.get(name) or load_extension("graftwork.places", name, attributes=REQUIRED)
    return cast(Place, kind())


def warm_up(place: Place) -> None:
    """Let the place prepare for workers that come soon, where it can."""
    if isinstance(place, LocalPlace):
        place.warm_up()
