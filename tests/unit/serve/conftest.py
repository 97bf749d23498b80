"""How the tests of serving run."""

import asyncio

import pytest


@pytest.fixture
def run():
    """Run a coroutine function to its end, with a deadline."""

    def go(main):
        return asyncio.run(asyncio.wait_for(main(), 120))

    return go
