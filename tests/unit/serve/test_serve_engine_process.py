"""What engine processes share: room for requests, and adapters that are unloaded when nobody uses them."""

import asyncio

import pytest

from graftwork.engines.process import AdapterSet, RequestRoom
from graftwork.http.messages import ApiError


def test_an_adapter_in_use_or_behind_an_alias_is_never_unloaded():
    adapters = AdapterSet(most=1)
    for name in ("old", "used", "kept", "new"):
        adapters.add(name, f"file of {name}")
    with adapters.using("used"), adapters.using(None):
        assert adapters.take_surplus(keep={"kept", "new"}) == ["file of old"]
        assert adapters.names == ["used", "kept", "new"]
    assert adapters.take_surplus(keep={"kept", "new"}) == ["file of used"]
    assert adapters.take_surplus(keep={"kept", "new"}) == []


def test_requests_wait_for_room_in_the_order_in_which_they_came():
    async def main():
        room = RequestRoom(requests=8, tokens=10, queue_limit=2)
        order, first_may_end = [], asyncio.Event()

        async def ask(name, tokens, until=None):
            async with room.take(tokens):
                order.append(name)
                if until is not None:
                    await until.wait()

        first = asyncio.create_task(ask("first", 8, first_may_end))
        while not order:
            await asyncio.sleep(0)
        # The small one would fit, but must not overtake the large one forever.
        large, small = asyncio.create_task(ask("large", 9)), asyncio.create_task(ask("small", 1))
        while room.waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="full"):
            await ask("too many", 1)
        first_may_end.set()
        await asyncio.gather(first, large, small)
        assert order == ["first", "large", "small"]
        assert (room.running, room.waiting, room.answered) == (0, 0, 3)

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_request_that_is_given_up_while_it_waits_frees_its_place():
    async def main():
        room = RequestRoom(requests=1, tokens=10, queue_limit=4)

        async def ask():
            async with room.take(1):
                pass

        async with room.take(1):
            waiting, behind = asyncio.create_task(ask()), asyncio.create_task(ask())
            while room.waiting < 2:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert room.waiting == 1
        await behind
        assert room.running == 0

    asyncio.run(asyncio.wait_for(main(), 300))


def test_one_that_leaves_the_queue_makes_way_for_those_behind_it():
    async def main():
        room = RequestRoom(requests=8, tokens=10, queue_limit=2)
        begun, may_end = [], asyncio.Event()

        async def ask(name, tokens):
            async with room.take(tokens):
                begun.append(name)
                await may_end.wait()

        tasks = [asyncio.create_task(ask("first", 8))]
        while not begun:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(ask("large", 9)), asyncio.create_task(ask("small", 1))]
        while room.waiting < 2:
            await asyncio.sleep(0)
        tasks[1].cancel()
        while "small" not in begun:
            await asyncio.sleep(0)
        assert begun == ["first", "small"]
        may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 300))
