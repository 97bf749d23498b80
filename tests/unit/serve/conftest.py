"""How the tests of serving run."""

import asyncio
import shutil
import time
from functools import partial

import pytest
from tool_template import TOOL_TEMPLATE

LIMIT = 30.0


@pytest.fixture
def run():
    """Run a coroutine function to its end, with a deadline."""

    def go(main):
        return asyncio.run(asyncio.wait_for(main(), 240))

    return go


@pytest.fixture
def run_with_limit(run, monkeypatch):
    """Run `main(limit, pass_when)` to its end, on machines of any speed.

    The limit is long. `pass_when(is_waiting)` puts the clock past it as soon as `is_waiting` says that
    nothing else will come.
    """
    ahead = 0.0
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + ahead)

    async def forward(is_waiting):
        nonlocal ahead
        while not is_waiting():
            await asyncio.sleep(0.001)
        ahead += LIMIT

    return lambda main: run(partial(main, LIMIT, lambda is_waiting: asyncio.create_task(forward(is_waiting))))


@pytest.fixture(scope="module")
def tool_base(tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_base")
    shutil.copytree(tiny_base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder
