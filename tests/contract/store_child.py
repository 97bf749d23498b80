"""What a second process does in the tests: `python store_child.py WHAT URL [ARGUMENT]`.

It says "ready", waits for one line on its input, and then says what it did, a line at a time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from store_samples import PROJECT, WHEN, release

from graftwork.records.errors import Busy
from graftwork.records.release import AliasMove
from graftwork.store.database import open_database
from graftwork.store.releases import ReleaseTable


def main(what: str, url: str, argument: str = "") -> None:
    if what == "open":
        say_ready()
        open_database(url).close()
        print("opened", flush=True)
        return
    index = ReleaseTable(open_database(url), project=PROJECT)
    say_ready()
    if what == "promote":
        try:
            index.move_alias(champion_move(argument, previous=None))
            print("won", flush=True)
        except Busy:
            print("lost", flush=True)
    elif what == "write":
        write_until_killed(index, prefix=argument)


def champion_move(to: str, *, previous: str | None) -> AliasMove:
    return AliasMove(alias="champion", release_id=to, previous=previous, who="child", when=WHEN, why="a race")


def say_ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def write_until_killed(index: ReleaseTable, *, prefix: str) -> None:
    number = 0
    while True:
        number += 1
        new = release(f"{prefix}-{number}")
        index.add(new)
        current = index.aliases().get("champion")
        index.move_alias(champion_move(new.id, previous=current))
        print(new.id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
