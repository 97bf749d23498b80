from concurrent.futures import ThreadPoolExecutor

from store_samples import WHEN

from graftwork.store.database import Database
from graftwork.store.looks import Looks


def test_each_look_counts_even_by_the_same_subject(database: Database):
    looks = Looks(database)
    assert looks.count("cases") == 0
    assert [looks.log("cases", subject="adapter", when=WHEN) for _ in range(3)] == [1, 2, 3]
    assert looks.count("cases") == 3


def test_every_test_set_has_its_own_count(database: Database):
    looks = Looks(database)
    looks.log("one", subject="adapter", when=WHEN)
    assert looks.log("two", subject="adapter", when=WHEN) == 1


def test_looks_at_the_same_time_are_all_counted(database: Database):
    looks = Looks(database)
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda n: looks.log("cases", subject=f"s{n}", when=WHEN), range(24)))
    assert sorted(numbers) == list(range(1, 25))
