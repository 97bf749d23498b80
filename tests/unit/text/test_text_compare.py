import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.compare import (
    Clusters,
    alike_pairs,
    cluster,
    containment,
    content_key,
    likeness,
    shingles,
    weigh,
)
from graftwork.text.normalise import last_lines, normalise, words


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Where is  it?", "where is it"),
        ("“Quoted” — text", '"quoted" - TEXT'),
        ("ﬁne", "fine"),
        ("Ｆｕｌｌ ｗｉｄｔｈ", "full width"),
    ],
)
def test_what_a_reader_calls_the_same_has_the_same_key(one, other):
    assert content_key(one) == content_key(other)


def test_texts_are_not_run_together_in_a_key():
    assert content_key("a b", "c") != content_key("a", "b c")


def test_scripts_without_spaces_are_taken_by_character():
    assert words("東京はabc") == ["東", "京", "は", "abc"]


@given(st.text())
def test_normalising_twice_changes_nothing_more(text):
    assert normalise(normalise(text)) == normalise(text)


def test_last_lines_come_from_the_end_without_blank_ones():
    assert last_lines("a\n\n b \r\n\n") == ["b", "a"]


def test_a_text_shorter_than_a_shingle_is_one_by_itself():
    assert shingles("two words") == {"two words"}
    assert shingles("  ?! ") == frozenset()


def test_shared_boilerplate_weighs_less_than_what_differs():
    common = "please answer this question about the "
    sets = [shingles(common + name, sizes=(1,)) for name in ("lynx", "otter", "heron", "badger", "stoat")]
    weighted = likeness(sets[0], sets[1], weights=weigh(sets))
    plain = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
    assert weighted < plain


def test_a_text_that_holds_another_contains_it():
    sets = [shingles("how old is it", sizes=(1,)), shingles("please look up how old is it", sizes=(1,))]
    assert containment(*sets, weights=weigh(sets)) == pytest.approx(1.0)


TEXTS = st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=8).map(" ".join), max_size=12)


@given(TEXTS, st.floats(0.3, 1.0))
def test_only_pairs_that_really_are_alike_are_named(texts, threshold):
    sets = [shingles(text, sizes=(1, 2)) for text in texts]
    weights = weigh(sets)
    for pair in alike_pairs(sets, threshold=threshold):
        assert pair.first < pair.second
        assert likeness(sets[pair.first], sets[pair.second], weights=weights) == pytest.approx(pair.likeness)
        assert pair.likeness >= threshold


@given(TEXTS)
def test_equal_texts_always_meet_in_one_cluster(texts):
    sets = [shingles(text) for text in texts]
    clusters = cluster(len(texts), alike_pairs(sets, threshold=0.9))
    for one, first in enumerate(sets):
        for other, second in enumerate(sets):
            if first and first == second:
                assert clusters.find(one) == clusters.find(other)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_clusters_are_the_same_in_any_order(joins):
    def made(order):
        clusters = Clusters(10)
        for one, other in order:
            clusters.join(one, other)
        return clusters.members()

    assert made(joins) == made(joins[::-1])


def test_nearly_equal_texts_are_found_among_many():
    texts = [f"row {n} talks about subject {n * 7} in its own words number {n * 13}" for n in range(300)]
    texts.append("the quick brown fox jumps over the lazy dog near the river bank at dawn")
    texts.append("the quick brown fox jumps over the lazy dog near the river bank at dusk")
    pairs = alike_pairs([shingles(text) for text in texts], threshold=0.7)
    assert (300, 301) in {(pair.first, pair.second) for pair in pairs}
