"""Records are built by pydantic when they are first used, which may be in several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from graftwork.records.base import Record


def define_records() -> type[Record]:
    class Inner(Record):
        number: int

    class Outer(Record):
        inner: Inner
        others: tuple[Inner, ...] = ()

    return Outer


def test_a_record_can_be_built_by_many_threads_at_once():
    threads = 8
    for _ in range(20):
        outer = define_records()
        start = threading.Barrier(threads)

        def validate(number, outer=outer, start=start):
            start.wait()
            return outer.model_validate({"inner": {"number": number}})

        with ThreadPoolExecutor(threads) as pool:
            records = list(pool.map(validate, range(threads)))
        assert [record.inner.number for record in records] == list(range(threads))
