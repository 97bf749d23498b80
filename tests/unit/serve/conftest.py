"""How the tests of serving run."""

import asyncio
import shutil

import pytest
from tool_template import TOOL_TEMPLATE


@pytest.fixture
def run():
    """Run a coroutine function to its end, with a deadline."""

    def go(main):
        return asyncio.run(asyncio.wait_for(main(), 240))

    return go


@pytest.fixture(scope="module")
def tool_base(tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_base")
    shutil.copytree(tiny_base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder
