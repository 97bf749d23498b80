from concurrent.futures import ThreadPoolExecutor

from store_samples import WHEN

from graftwork.store.database import Database
from graftwork.store.runs import EvaluationLog


def test_each_evaluation_counts_even_by_the_same_subject(database: Database):
    looks = EvaluationLog(database)
    assert looks.count("cases") == 0
    assert [looks.log("cases", subject="adapter", when=WHEN) for _ in range(3)] == [1, 2, 3]
    assert looks.count("cases") == 3


def test_every_test_set_has_its_own_count(database: Database):
    looks = EvaluationLog(database)
    looks.log("one", subject="adapter", when=WHEN)
    assert looks.log("two", subject="adapter", when=WHEN) == 1


def test_concurrent_evaluations_are_all_counted(database: Database):
    looks = EvaluationLog(database)
    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(lambda n: looks.log("cases", subject=f"s{n}", when=WHEN), range(24)))
    assert sorted(numbers) == list(range(1, 25))


def test_the_same_candidate_again_is_an_evaluation_and_no_further_candidate(database: Database):
    looks = EvaluationLog(database)
    for subject in ("one", "two", "one", "one"):
        looks.log("cases", subject=subject, when=WHEN)
    looks.log("other cases", subject="three", when=WHEN)
    assert (looks.count("cases"), looks.candidates("cases")) == (4, 2)
    assert looks.candidates("never looked at") == 0


def test_a_set_that_grew_or_was_renamed_is_no_fresh_one(database: Database):
    looks = EvaluationLog(database)
    first, grown = [f"q{n}" for n in range(20)], [f"q{n}" for n in range(60)]
    looks.log("set", subject="one", when="2026-01-01", questions=first)
    looks.log("set", subject="two", when="2026-01-02", questions=first)
    assert (looks.position("set", subject="one"), looks.position("set", subject="two")) == (1, 2)
    looks.log("renamed", subject="two", when="2026-01-03", questions=first)
    assert looks.position("renamed", subject="two") == 2
    looks.log("grown", subject="two", when="2026-01-04", questions=grown)
    assert looks.position("grown", subject="two") == 3
    looks.log("fresh", subject="two", when="2026-01-05", questions=[f"n{n}" for n in range(60)])
    assert looks.position("fresh", subject="two") == 1
    assert looks.position("never looked at", subject="two") == 1
