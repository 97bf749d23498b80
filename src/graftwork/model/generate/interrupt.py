"""Passes that end in the middle once nobody waits for what they compute.

In: a model, and a question that is asked before each of its modules runs. Out: `Unwanted` where the answer is
yes. A long prompt takes a processor seconds: a client that asks and leaves must not hold it up that long.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Unwanted(Exception):
    """Everybody who asked for this pass has left."""


@contextmanager
def interrupted_when(model: Any, nobody_waits: Callable[[], bool]) -> Iterator[None]:
    def look(_module: Any, _inputs: Any) -> None:
        if nobody_waits():
            raise Unwanted

    hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
