"""How the tests of serving run."""

import asyncio
import shutil
from functools import partial

import pytest
from tool_template import TOOL_TEMPLATE

from time_limits import check_with_limits


@pytest.fixture
def run():
    """Run a coroutine function to its end, with a deadline."""

    def go(main):
        return asyncio.run(asyncio.wait_for(main(), 240))

    return go


@pytest.fixture
def run_with_limit(run):
    """Run a coroutine function with a short time limit, and with longer ones if the machine is too slow."""
    return lambda main: check_with_limits(lambda limit: run(partial(main, limit)), 0.05, 0.5, 5.0)


@pytest.fixture(scope="module")
def tool_base(tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_base")
    shutil.copytree(tiny_base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder
