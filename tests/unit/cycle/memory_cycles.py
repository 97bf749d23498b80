"""The state of a coordinator in memory."""

from graftwork.cycle.state import CoordinatorState


class MemoryCycles:
    """`CycleTable` without a database."""

    def __init__(self):
        self._state = CoordinatorState()
        self._ended = {}

    def read(self):
        return self._state

    def change(self, change):
        self._state = change(self._state)
        cycle = self._state.cycle
        if cycle is not None and not cycle.is_open:
            self._ended[cycle.number] = cycle
        return self._state

    def history(self, *, limit=20):
        return tuple(reversed(self._ended.values()))[:limit]
