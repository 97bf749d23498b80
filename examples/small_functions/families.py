"""Families of one-line functions to learn from: parameters, arguments, and a name, a sentence and an
expression for each function.

A family is learned from, used to choose settings (develop_families.py) or held out (held_out_families.py),
never two of them. `make_cases.py` turns them into prompts and cases.
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
