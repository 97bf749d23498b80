import pytest

from graftwork.text.wording import duration, plural


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.02, "20 ms"),
        (0.6, "0.6 s"),
        (5, "5.0 s"),
        (42, "42 s"),
        (59.7, "1 min 00 s"),
        (65, "1 min 05 s"),
        (119.6, "2 min 00 s"),
        (231, "3 min 51 s"),
        (3599.8, "1 h 00 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 rows"), (1, "1 row"), (1.0, "1 row"), (2.5, "2.5 rows"), (2000, "2,000 rows")]
)
def test_a_count_has_its_noun_in_the_right_number(count, text):
    assert plural(count, "row") == text
