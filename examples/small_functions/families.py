"""Families of one-line functions: parameters, arguments, and a name, a sentence and an expression each.

Families are either learned from or held out, never both. `make_cases.py` turns them into prompts and cases.
"""

from typing import NamedTuple


class Family(NamedTuple):
    parameters: str
    arguments: tuple[tuple[object, ...], ...]
    """The first is the example in the prompt, the rest are calls that decide."""
    functions: str
    """One function a line: name | sentence | expression."""


NUMBERS = ((4,), (7,), (0,), (12,), (-3,), (25,), (100,))
TEXTS = (("banana split",), ("Level",), ("a cat sat",), ("HELLO",), ("sees",), (" x1 y2 ",), ("apples",))
LISTS = (
    ([3, 1, 2],),
    ([5, 8, 5, 4],),
    ([-2, 7, 0, 9, 7],),
    ([10, 20],),
    ([6, -1, -4],),
    ([1, 2, 3, 4, 5, 6],),
)
WORDS = (
    (["red", "blue", "green"],),
    (["ant", "bee"],),
    (["sun", "moon", "star", "sky"],),
    (["apple", "fig", "avocado"],),
    (["zebra", "ox", "cat", "antelope"],),
    (["One", "two", "Three"],),
)
PAIRS_OF_NUMBERS = ((5, 3), (2, 9), (0, 4), (7, 7), (-6, 2), (10, -5), (12, 4))

LEARNED = {
    "arithmetic": Family(
        "n",
        NUMBERS,
        """
        double | Return twice n. | n * 2
        triple | Return three times n. | n * 3
        add_ten | Return n plus ten. | n + 10
        minus_three | Return n minus three. | n - 3
        square | Return n squared. | n ** 2
        cube | Return the cube of n. | n ** 3
        negate | Return n with the opposite sign. | -n
        half | Return half of n as a whole number, rounded down. | n // 2
        last_digit_of_square | Return the last digit of n squared. | n ** 2 % 10
        absolute | Return the absolute value of n. | abs(n)
        next_number | Return the number after n. | n + 1
        double_plus_one | Return twice n plus one. | 2 * n + 1
        from_hundred | Return one hundred minus n. | 100 - n
        times_next | Return n times the number after it. | n * (n + 1)
        """,
    ),
    "two_numbers": Family(
        "a, b",
        PAIRS_OF_NUMBERS,
        """
        add | Return the sum of a and b. | a + b
        subtract | Return a minus b. | a - b
        multiply | Return the product of a and b. | a * b
        larger | Return the larger of a and b. | max(a, b)
        smaller | Return the smaller of a and b. | min(a, b)
        distance | Return the absolute difference of a and b. | abs(a - b)
        average | Return the mean of a and b. | (a + b) / 2
        sum_of_squares | Return the sum of the squares of a and b. | a ** 2 + b ** 2
        square_of_sum | Return the square of the sum of a and b. | (a + b) ** 2
        twice_sum | Return twice the sum of a and b. | 2 * (a + b)
        a_plus_twice_b | Return a plus twice b. | a + 2 * b
        pair_up | Return a list with a and b. | [a, b]
        swapped | Return a list with b first and then a. | [b, a]
        """,
    ),
    "number_tests": Family(
        "n",
        ((4,), (7,), (0,), (12,), (-3,), (15,), (105,), (50,), (9,)),
        """
        is_even | Return whether n is even. | n % 2 == 0
        is_odd | Return whether n is odd. | n % 2 == 1
        is_positive | Return whether n is greater than zero. | n > 0
        is_negative | Return whether n is less than zero. | n < 0
        is_zero | Return whether n is zero. | n == 0
        is_not_zero | Return whether n is not zero. | n != 0
        by_three | Return whether n is divisible by three. | n % 3 == 0
        by_five | Return whether n is divisible by five. | n % 5 == 0
        over_ten | Return whether n is greater than ten. | n > 10
        under_five | Return whether n is less than five. | n < 5
        one_digit | Return whether n is between 0 and 9. | 0 <= n <= 9
        two_digits | Return whether n is between 10 and 99. | 10 <= n <= 99
        by_four | Return whether n is a multiple of four. | n % 4 == 0
        """,
    ),
    "text_changes": Family(
        "text",
        TEXTS,
        """
        shout | Return the text in upper case. | text.upper()
        whisper | Return the text in lower case. | text.lower()
        backwards | Return the text reversed. | text[::-1]
        trimmed | Return the text without spaces at both ends. | text.strip()
        first_letter | Return the first character of the text. | text[0]
        last_letter | Return the last character of the text. | text[-1]
        without_first | Return the text without its first character. | text[1:]
        without_last | Return the text without its last character. | text[:-1]
        twice | Return the text repeated twice. | text * 2
        excited | Return the text with an exclamation mark at the end. | text + "!"
        in_brackets | Return the text in round brackets. | "(" + text + ")"
        underscored | Return the text with spaces replaced by underscores. | text.replace(" ", "_")
        no_spaces | Return the text without spaces. | text.replace(" ", "")
        swapped_case | Return the text with upper and lower case swapped. | text.swapcase()
        """,
    ),
    "text_tests": Family(
        "text",
        TEXTS,
        """
        starts_with_a | Return whether the text starts with "a". | text.startswith("a")
        ends_with_s | Return whether the text ends with "s". | text.endswith("s")
        has_space | Return whether the text contains a space. | " " in text
        is_palindrome | Return whether the text reads the same backwards. | text == text[::-1]
        is_long | Return whether the text has more than six characters. | len(text) > 6
        is_short | Return whether the text has fewer than six characters. | len(text) < 6
        is_upper | Return whether the text is in upper case. | text.isupper()
        is_lower | Return whether the text is in lower case. | text.islower()
        has_e | Return whether the text contains the letter e. | "e" in text
        only_letters | Return whether the text has letters only. | text.isalpha()
        even_length | Return whether the length of the text is even. | len(text) % 2 == 0
        no_a | Return whether the text does not contain the letter a. | "a" not in text
        """,
    ),
    "text_counts": Family(
        "text",
        TEXTS,
        """
        length | Return the number of characters in the text. | len(text)
        count_a | Return how often the letter a occurs in the text. | text.count("a")
        count_spaces | Return the number of spaces in the text. | text.count(" ")
        count_words | Return the number of words in the text. | len(text.split())
        count_distinct | Return the number of different characters in the text. | len(set(text))
        half_length | Return half of the length of the text, rounded down. | len(text) // 2
        double_length | Return twice the length of the text. | len(text) * 2
        count_e | Return how often the letter e occurs in the text. | text.count("e")
        place_of_e | Return the position of the first e in the text, or -1. | text.find("e")
        count_vowels | Return the number of vowels in the text. | sum(c in "aeiou" for c in text)
        count_capitals | Return the number of capital letters. | sum(c.isupper() for c in text)
        count_digits | Return the number of digits in the text. | sum(c.isdigit() for c in text)
        """,
    ),
    "list_to_number": Family(
        "items",
        LISTS,
        """
        total | Return the sum of the items. | sum(items)
        largest | Return the largest item. | max(items)
        smallest | Return the smallest item. | min(items)
        how_many | Return the number of items. | len(items)
        first | Return the first item. | items[0]
        last | Return the last item. | items[-1]
        second | Return the second item. | items[1]
        mean | Return the mean of the items. | sum(items) / len(items)
        span | Return the difference between the largest and the smallest item. | max(items) - min(items)
        sum_squares | Return the sum of the squares of the items. | sum(x ** 2 for x in items)
        count_even | Return how many items are even. | sum(x % 2 == 0 for x in items)
        ends_sum | Return the sum of the first and the last item. | items[0] + items[-1]
        double_total | Return twice the sum of the items. | 2 * sum(items)
        """,
    ),
    "list_to_list": Family(
        "items",
        LISTS,
        """
        in_order | Return the items sorted. | sorted(items)
        from_largest | Return the items sorted from largest to smallest. | sorted(items, reverse=True)
        turned | Return the items in reverse order. | items[::-1]
        doubled | Return a list of each item times two. | [x * 2 for x in items]
        squares | Return a list of the squares of the items. | [x ** 2 for x in items]
        evens | Return the even items. | [x for x in items if x % 2 == 0]
        odds | Return the odd items. | [x for x in items if x % 2 == 1]
        positives | Return the items greater than zero. | [x for x in items if x > 0]
        first_two | Return the first two items. | items[:2]
        last_two | Return the last two items. | items[-2:]
        rest | Return the items without the first. | items[1:]
        but_last | Return the items without the last. | items[:-1]
        plus_one | Return a list of each item plus one. | [x + 1 for x in items]
        negated | Return a list of the items with opposite signs. | [-x for x in items]
        """,
    ),
    "list_tests": Family(
        "items",
        (*LISTS, ([],), ([7, 7],)),
        """
        is_empty | Return whether there are no items. | len(items) == 0
        has_seven | Return whether seven is among the items. | 7 in items
        has_zero | Return whether zero is among the items. | 0 in items
        all_positive | Return whether all items are greater than zero. | all(x > 0 for x in items)
        any_negative | Return whether any item is less than zero. | any(x < 0 for x in items)
        is_sorted | Return whether the items are in ascending order. | items == sorted(items)
        all_different | Return whether no item occurs twice. | len(items) == len(set(items))
        more_than_three | Return whether there are more than three items. | len(items) > 3
        big_sum | Return whether the sum of the items is over ten. | sum(items) > 10
        all_even | Return whether all items are even. | all(x % 2 == 0 for x in items)
        any_even | Return whether any item is even. | any(x % 2 == 0 for x in items)
        two_items | Return whether there are exactly two items. | len(items) == 2
        """,
    ),
    "two_lists": Family(
        "a, b",
        (
            ([1, 2], [3, 4]),
            ([5, 0, 2], [2, 2, 7]),
            ([9], [4]),
            ([-1, 3], [3, 8]),
            ([6, 6, 1], [0, 1, 5]),
            ([2, 4], [4, 2]),
        ),
        """
        joined | Return the items of a followed by those of b. | a + b
        b_then_a | Return the items of b followed by those of a. | b + a
        pair_sums | Return the sums of the items of a and b by position. | [x + y for x, y in zip(a, b)]
        pair_products | Return the products of a and b by position. | [x * y for x, y in zip(a, b)]
        dot | Return the dot product of a and b. | sum(x * y for x, y in zip(a, b))
        in_both | Return the items of a that are also in b. | [x for x in a if x in b]
        only_in_a | Return the items of a that are not in b. | [x for x in a if x not in b]
        all_sorted | Return all items of a and b sorted. | sorted(a + b)
        total_of_both | Return the sum of all items of a and b. | sum(a) + sum(b)
        total_length | Return the number of items in a and b together. | len(a) + len(b)
        same_items | Return whether a and b have the same items in any order. | sorted(a) == sorted(b)
        """,
    ),
    "mappings": Family(
        "d",
        (
            ({"b": 2, "a": 1},),
            ({"x": 5},),
            ({"k": 0, "a": 7, "c": 3},),
            ({"z": -1, "y": 4},),
            ({"m": 10, "n": 20, "o": 5, "a": 2},),
            ({"p": 3, "b": 9},),
        ),
        """
        key_list | Return the keys of d as a list. | list(d.keys())
        value_list | Return the values of d as a list. | list(d.values())
        sorted_keys | Return the keys of d sorted. | sorted(d)
        value_sum | Return the sum of the values of d. | sum(d.values())
        largest_value | Return the largest value of d. | max(d.values())
        smallest_value | Return the smallest value of d. | min(d.values())
        size | Return the number of keys in d. | len(d)
        has_a | Return whether "a" is a key of d. | "a" in d
        get_a | Return the value of "a" in d, or 0. | d.get("a", 0)
        sorted_values | Return the values of d sorted. | sorted(d.values())
        swap | Return d with keys and values swapped. | {str(v): k for k, v in d.items()}
        """,
    ),
    "text_and_number": Family(
        "text, n",
        (("hello", 2), ("abcdef", 3), ("python", 1), ("moon", 4), ("if", 5), ("tree", 2)),
        """
        repeat | Return the text repeated n times. | text * n
        first_n | Return the first n characters of the text. | text[:n]
        last_n | Return the last n characters of the text. | text[-n:]
        skip_n | Return the text without its first n characters. | text[n:]
        drop_last_n | Return the text without its last n characters. | text[:-n]
        every_nth | Return every n-th character of the text. | text[::n]
        with_number | Return the text followed by the number n. | text + str(n)
        length_plus | Return the length of the text plus n. | len(text) + n
        longer_than | Return whether the text has more than n characters. | len(text) > n
        length_times | Return the length of the text times n. | len(text) * n
        first_n_upper | Return the first n characters in upper case. | text[:n].upper()
        """,
    ),
    "word_lists": Family(
        "words",
        WORDS,
        """
        join_spaces | Return the words joined by spaces. | " ".join(words)
        join_commas | Return the words joined by commas. | ",".join(words)
        join_nothing | Return the words joined without anything between them. | "".join(words)
        word_lengths | Return a list of the lengths of the words. | [len(w) for w in words]
        longest | Return the longest word. | max(words, key=len)
        initials | Return a list of the first letters of the words. | [w[0] for w in words]
        all_upper | Return a list of the words in upper case. | [w.upper() for w in words]
        sorted_words | Return the words sorted. | sorted(words)
        by_length | Return the words sorted by length. | sorted(words, key=len)
        word_count | Return the number of words. | len(words)
        letters_in_all | Return the number of letters in all words together. | sum(len(w) for w in words)
        last_word | Return the last word. | words[-1]
        """,
    ),
}

HELD_OUT = {
    "units": Family(
        "x",
        ((2,), (5,), (0,), (12,), (30,), (100,)),
        """
        meters_to_centimeters | Return x meters in centimeters. | x * 100
        kilometers_to_meters | Return x kilometers in meters. | x * 1000
        minutes_to_seconds | Return x minutes in seconds. | x * 60
        hours_to_minutes | Return x hours in minutes. | x * 60
        days_to_hours | Return x days in hours. | x * 24
        weeks_to_days | Return x weeks in days. | x * 7
        dozens_to_pieces | Return the number of pieces in x dozens. | x * 12
        dollars_to_cents | Return x dollars in cents. | x * 100
        years_to_months | Return x years in months. | x * 12
        celsius_to_fahrenheit | Return x degrees Celsius in Fahrenheit. | x * 9 / 5 + 32
        percent_to_fraction | Return x percent as a fraction. | x / 100
        square_perimeter | Return the perimeter of a square with side x. | 4 * x
        square_area | Return the area of a square with side x. | x * x
        cube_volume | Return the volume of a cube with side x. | x ** 3
        """,
    ),
    "two_texts": Family(
        "a, b",
        (
            ("sun", "flower"),
            ("Hi", "hi"),
            ("ab", "cab"),
            ("note", "book"),
            ("x", "x"),
            ("car", "carpet"),
            ("three", "ten"),
        ),
        """
        glue | Return a followed by b. | a + b
        glue_reversed | Return b followed by a. | b + a
        with_space | Return a and b with a space between them. | a + " " + b
        with_dash | Return a and b with a dash between them. | a + "-" + b
        same_text | Return whether a and b are equal. | a == b
        same_ignoring_case | Return whether a and b are equal if case is ignored. | a.lower() == b.lower()
        same_length | Return whether a and b have the same length. | len(a) == len(b)
        b_starts_with_a | Return whether b starts with a. | b.startswith(a)
        b_contains_a | Return whether b contains a. | a in b
        combined_length | Return the length of a and b together. | len(a) + len(b)
        length_difference | Return the absolute difference of the lengths. | abs(len(a) - len(b))
        same_first_letter | Return whether a and b start with the same letter. | a[0] == b[0]
        """,
    ),
    "list_and_number": Family(
        "items, n",
        (
            ([3, 1, 3, 2], 3),
            ([5, 8, 4], 2),
            ([7, 0, 7, 7, 9], 7),
            ([1, 2, 3, 4], 1),
            ([6, -1], 4),
            ([2, 2, 10], 2),
        ),
        """
        count_n | Return how often n occurs in items. | items.count(n)
        contains_n | Return whether n is in items. | n in items
        lacks_n | Return whether n is not in items. | n not in items
        add_n | Return a list of each item plus n. | [x + n for x in items]
        times_n | Return a list of each item times n. | [x * n for x in items]
        above_n | Return the items greater than n. | [x for x in items if x > n]
        below_n | Return the items less than n. | [x for x in items if x < n]
        remove_n | Return the items without every n. | [x for x in items if x != n]
        with_n | Return the items with n added at the end. | items + [n]
        n_first | Return a list with n first and then the items. | [n] + items
        sum_plus_n | Return the sum of the items plus n. | sum(items) + n
        count_above | Return how many items are greater than n. | sum(x > n for x in items)
        """,
    ),
    "three_numbers": Family(
        "a, b, c",
        ((1, 2, 3), (9, 4, 5), (7, 7, 7), (0, -2, 6), (10, 3, 1), (2, 5, 9), (5, 5, 10)),
        """
        sum_of_three | Return the sum of a, b and c. | a + b + c
        product_of_three | Return the product of a, b and c. | a * b * c
        largest_of_three | Return the largest of a, b and c. | max(a, b, c)
        smallest_of_three | Return the smallest of a, b and c. | min(a, b, c)
        mean_of_three | Return the mean of a, b and c. | (a + b + c) / 3
        middle_of_three | Return the middle one of a, b and c by size. | sorted([a, b, c])[1]
        spread_of_three | Return the largest minus the smallest of a, b and c. | max(a, b, c) - min(a, b, c)
        all_equal | Return whether a, b and c are equal. | a == b == c
        ascending | Return whether a is less than b and b is less than c. | a < b < c
        adds_up | Return whether a plus b equals c. | a + b == c
        as_list | Return a list with a, b and c. | [a, b, c]
        sorted_three | Return a, b and c as a sorted list. | sorted([a, b, c])
        """,
    ),
    "up_to_n": Family(
        "n",
        ((4,), (1,), (6,), (10,), (13,), (25,)),
        """
        count_up | Return the list of numbers from 1 to n. | list(range(1, n + 1))
        count_down | Return the list of numbers from n down to 1. | list(range(n, 0, -1))
        below | Return the list of numbers from 0 to n - 1. | list(range(n))
        sum_to | Return the sum of the numbers from 1 to n. | sum(range(1, n + 1))
        evens_to | Return the even numbers from 2 to n. | list(range(2, n + 1, 2))
        odds_to | Return the odd numbers from 1 to n. | list(range(1, n + 1, 2))
        squares_to | Return the squares of the numbers from 1 to n. | [i ** 2 for i in range(1, n + 1)]
        zeros | Return a list of n zeros. | [0] * n
        digit_sum | Return the sum of the digits of n. | sum(int(c) for c in str(n))
        digit_count | Return the number of digits of n. | len(str(n))
        digits | Return the digits of n as a list of numbers. | [int(c) for c in str(n)]
        stars | Return a text of n stars. | "*" * n
        """,
    ),
    "pairs": Family(
        "pairs",
        (
            ([[1, 4], [3, 2]],),
            ([[5, 5]],),
            ([[2, 0], [1, 9], [8, 3]],),
            ([[7, -1], [0, 6]],),
            ([[4, 4], [6, 1], [2, 8]],),
            ([[9, 3], [3, 9]],),
        ),
        """
        firsts | Return a list of the first of each pair. | [p[0] for p in pairs]
        seconds | Return a list of the second of each pair. | [p[1] for p in pairs]
        sums_of_pairs | Return a list of the sum of each pair. | [p[0] + p[1] for p in pairs]
        products_of_pairs | Return a list of the product of each pair. | [p[0] * p[1] for p in pairs]
        differences | Return a list of the first minus the second of each pair. | [p[0] - p[1] for p in pairs]
        count_pairs | Return the number of pairs. | len(pairs)
        first_pair | Return the first pair. | pairs[0]
        last_pair | Return the last pair. | pairs[-1]
        sum_of_firsts | Return the sum of the first of each pair. | sum(p[0] for p in pairs)
        by_second | Return the pairs sorted by their second. | sorted(pairs, key=lambda p: p[1])
        largest_second | Return the largest second of the pairs. | max(p[1] for p in pairs)
        swapped_pairs | Return the pairs with both values swapped. | [[p[1], p[0]] for p in pairs]
        """,
    ),
    "tables": Family(
        "rows",
        (
            ([[1, 2], [3, 4]],),
            ([[5, 0, 2]],),
            ([[7], [8], [9]],),
            ([[2, 2], [6, -1], [0, 3]],),
            ([[10, 20, 30], [4, 5, 6]],),
            ([[1, 1], [1, 5]],),
        ),
        """
        count_rows | Return the number of rows. | len(rows)
        count_columns | Return the number of values in the first row. | len(rows[0])
        row_sums | Return a list of the sum of each row. | [sum(r) for r in rows]
        row_lengths | Return a list of the length of each row. | [len(r) for r in rows]
        row_largest | Return a list of the largest value of each row. | [max(r) for r in rows]
        row_smallest | Return a list of the smallest value of each row. | [min(r) for r in rows]
        grand_total | Return the sum of all values in all rows. | sum(sum(r) for r in rows)
        flat | Return all values of all rows in one list. | [x for r in rows for x in r]
        first_column | Return a list of the first value of each row. | [r[0] for r in rows]
        last_column | Return a list of the last value of each row. | [r[-1] for r in rows]
        first_row | Return the first row. | rows[0]
        rows_reversed | Return the rows in reverse order. | rows[::-1]
        """,
    ),
    "text_to_list": Family(
        "text",
        (
            ("one two three",),
            ("go",),
            ("the big old tree",),
            ("Red blue",),
            ("a b a c",),
            ("zoo ape bee",),
        ),
        """
        words_of | Return the words of the text as a list. | text.split()
        letters_of | Return the characters of the text as a list. | list(text)
        first_word | Return the first word of the text. | text.split()[0]
        final_word | Return the last word of the text. | text.split()[-1]
        words_sorted | Return the words of the text sorted. | sorted(text.split())
        words_reversed | Return the words of the text in reverse order as a list. | text.split()[::-1]
        lengths_of_words | Return a list of the lengths of the words. | [len(w) for w in text.split()]
        first_letters | Return a list of the first letter of each word. | [w[0] for w in text.split()]
        upper_words | Return the words of the text in upper case as a list. | text.upper().split()
        longest_word | Return the longest word of the text. | max(text.split(), key=len)
        words_joined | Return the words of the text joined by dashes. | "-".join(text.split())
        characters_sorted | Return the characters of the text sorted as a list. | sorted(text)
        """,
    ),
    "comparisons": Family(
        "a, b",
        ((5, 3), (2, 9), (0, 4), (7, 7), (-6, 2), (10, -5), (12, 4), (3, 12), (-2, -8)),
        """
        are_equal | Return whether a and b are equal. | a == b
        a_is_greater | Return whether a is greater than b. | a > b
        a_is_less | Return whether a is less than b. | a < b
        at_least | Return whether a is at least b. | a >= b
        both_positive | Return whether a and b are both greater than zero. | a > 0 and b > 0
        any_negative_number | Return whether a or b is less than zero. | a < 0 or b < 0
        both_even | Return whether a and b are both even. | a % 2 == 0 and b % 2 == 0
        sum_is_even | Return whether the sum of a and b is even. | (a + b) % 2 == 0
        sum_over_ten | Return whether the sum of a and b is greater than ten. | a + b > 10
        divisible | Return whether a is divisible by b. | a % b == 0
        same_sign | Return whether the product of a and b is positive. | a * b > 0
        are_neighbors | Return whether a and b differ by less than three. | abs(a - b) < 3
        """,
    ),
    "intervals": Family(
        "x, low, high",
        ((5, 1, 9), (0, 2, 6), (12, 3, 10), (4, 4, 8), (7, -1, 7), (-3, -5, 5), (20, 10, 15)),
        """
        is_inside | Return whether x is at least low and at most high. | low <= x <= high
        is_outside | Return whether x is less than low or greater than high. | x < low or x > high
        clamp | Return x limited to the interval from low to high. | max(low, min(x, high))
        at_least_low | Return the larger of x and low. | max(x, low)
        at_most_high | Return the smaller of x and high. | min(x, high)
        above_low | Return x minus low. | x - low
        below_high | Return high minus x. | high - x
        width | Return high minus low plus x. | high - low + x
        middle | Return the mean of low and high. | (low + high) / 2
        is_an_end | Return whether x equals low or high. | x == low or x == high
        distance_to_middle | Return how far x is from the mean of low and high. | abs(x - (low + high) / 2)
        three_sorted | Return x, low and high as a sorted list. | sorted([x, low, high])
        """,
    ),
}
