"""Families that are only evaluated on: nothing is trained on them, and no setting was chosen by them."""

from families import Family

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
    "rectangles": Family(
        "width, height",
        ((3, 4), (5, 2), (1, 9), (6, 6), (10, 7), (8, 3)),
        """
        area | Return the area of the rectangle. | width * height
        perimeter | Return the perimeter of the rectangle. | 2 * (width + height)
        is_square | Return whether width and height are equal. | width == height
        is_wide | Return whether the width is greater than the height. | width > height
        is_tall | Return whether the height is greater than the width. | height > width
        long_side | Return the longer side. | max(width, height)
        short_side | Return the shorter side. | min(width, height)
        half_area | Return half of the area. | width * height / 2
        doubled_area | Return the area with both sides doubled. | 4 * width * height
        side_difference | Return the absolute difference of the sides. | abs(width - height)
        aspect | Return the width divided by the height. | width / height
        turned_sides | Return a list with the height first and then the width. | [height, width]
        """,
    ),
    "prices": Family(
        "price, count",
        ((10, 3), (4, 5), (7, 1), (25, 2), (0, 8), (12, 10)),
        """
        total_price | Return the price of count pieces. | price * count
        half_price | Return half of the price of count pieces. | price * count / 2
        with_shipping | Return the price of count pieces plus 5 for shipping. | price * count + 5
        one_free | Return the price of count pieces if one of them is free. | price * (count - 1)
        is_free | Return whether the price is zero. | price == 0
        is_expensive | Return whether the price of count pieces is over 50. | price * count > 50
        needs_more | Return whether count is less than three. | count < 3
        price_list | Return a list with the price count times. | [price] * count
        with_discount | Return the price of count pieces minus 2. | price * count - 2
        raised_price | Return the price plus one for each piece. | price + count
        label | Return the price as text with a dollar sign in front. | "$" + str(price)
        order_line | Return count and price as text with an x between them. | str(count) + "x" + str(price)
        """,
    ),
    "points": Family(
        "p, q",
        (
            ([1, 2], [4, 6]),
            ([0, 0], [3, 4]),
            ([5, -1], [5, 3]),
            ([-2, 7], [1, 7]),
            ([2, 2], [2, 2]),
            ([9, 4], [-3, 0]),
        ),
        """
        x_of | Return the first value of p. | p[0]
        y_of | Return the second value of p. | p[1]
        x_distance | Return the absolute difference of the first values of p and q. | abs(p[0] - q[0])
        y_distance | Return the absolute difference of the second values of p and q. | abs(p[1] - q[1])
        same_point | Return whether p and q are equal. | p == q
        same_x | Return whether the first values of p and q are equal. | p[0] == q[0]
        same_y | Return whether the second values of p and q are equal. | p[1] == q[1]
        point_sum | Return a list of the sums of p and q by position. | [p[0] + q[0], p[1] + q[1]]
        mirrored | Return p with its two values swapped. | [p[1], p[0]]
        q_then_p | Return the values of q followed by those of p. | q + p
        is_right_of | Return whether the first value of p is greater than that of q. | p[0] > q[0]
        is_origin | Return whether both values of p are zero. | p == [0, 0]
        """,
    ),
    "file_names": Family(
        "name",
        (
            ("photo.png",),
            ("notes.txt",),
            ("Main.py",),
            ("a.b.txt",),
            ("My Report.pdf",),
            ("setup.py",),
        ),
        """
        is_text_file | Return whether the name ends with ".txt". | name.endswith(".txt")
        is_python_file | Return whether the name ends with ".py". | name.endswith(".py")
        extension | Return the part of the name after the last dot. | name.split(".")[-1]
        stem | Return the part of the name before the first dot. | name.split(".")[0]
        count_dots | Return the number of dots in the name. | name.count(".")
        name_parts | Return the parts of the name between dots as a list. | name.split(".")
        lower_name | Return the name in lower case. | name.lower()
        backup | Return the name with ".bak" at the end. | name + ".bak"
        hidden | Return the name with a dot in front. | "." + name
        in_folder | Return the name with "files/" in front. | "files/" + name
        without_blanks | Return the name with spaces replaced by dashes. | name.replace(" ", "-")
        has_capital | Return whether the name is not in lower case. | name != name.lower()
        """,
    ),
    "scores": Family(
        "scores",
        (
            ([70, 90, 50],),
            ([100, 40],),
            ([55, 65, 75, 85],),
            ([30],),
            ([88, 92, 61],),
            ([45, 50, 95, 20, 60],),
        ),
        """
        best_score | Return the highest score. | max(scores)
        worst_score | Return the lowest score. | min(scores)
        mean_score | Return the mean of the scores. | sum(scores) / len(scores)
        passed | Return the scores of at least 60. | [s for s in scores if s >= 60]
        failed | Return the scores below 60. | [s for s in scores if s < 60]
        count_passed | Return how many scores are at least 60. | sum(s >= 60 for s in scores)
        all_passed | Return whether all scores are at least 60. | all(s >= 60 for s in scores)
        any_failed | Return whether any score is below 60. | any(s < 60 for s in scores)
        with_bonus | Return a list of each score plus 5. | [s + 5 for s in scores]
        ranking | Return the scores from highest to lowest. | sorted(scores, reverse=True)
        has_hundred | Return whether 100 is among the scores. | 100 in scores
        best_two | Return the two highest scores, highest first. | sorted(scores, reverse=True)[:2]
        """,
    ),
    "characters": Family(
        "c",
        (("a",), ("Z",), ("7",), ("e",), (" ",), ("B",), ("o",)),
        """
        is_letter | Return whether c is a letter. | c.isalpha()
        is_digit | Return whether c is a digit. | c.isdigit()
        is_capital | Return whether c is a capital letter. | c.isupper()
        is_small | Return whether c is a small letter. | c.islower()
        is_vowel | Return whether c is one of the letters a, e, i, o, u. | c in "aeiou"
        is_blank | Return whether c is a space. | c == " "
        code_of | Return the character code of c. | ord(c)
        next_code | Return the character code of c plus one. | ord(c) + 1
        three_times | Return c repeated three times. | c * 3
        in_quotes | Return c in single quotes. | "'" + c + "'"
        upper_of | Return c in upper case. | c.upper()
        and_small | Return c followed by c in lower case. | c + c.lower()
        """,
    ),
    "two_flags": Family(
        "a, b",
        ((True, False), (True, True), (False, True), (False, False), (True, False)),
        """
        both | Return whether a and b are both true. | a and b
        either | Return whether a or b is true. | a or b
        neither | Return whether neither a nor b is true. | not (a or b)
        exactly_one | Return whether exactly one of a and b is true. | a != b
        not_a | Return the opposite of a. | not a
        not_b | Return the opposite of b. | not b
        flags_agree | Return whether a and b are the same. | a == b
        a_without_b | Return whether a is true and b is not. | a and not b
        count_true | Return how many of a and b are true. | int(a) + int(b)
        flag_list | Return a list with b and a. | [b, a]
        yes_or_no | Return "yes" if a is true and "no" if not. | "yes" if a else "no"
        one_or_zero | Return 1 if b is true and 0 if not. | 1 if b else 0
        """,
    ),
    "inventory": Family(
        "stock, item",
        (
            ({"apple": 3, "pear": 0}, "apple"),
            ({"nut": 5}, "nut"),
            ({"egg": 12, "ham": 2, "tea": 0}, "tea"),
            ({"fig": 7, "oat": 1}, "oat"),
            ({"pea": 4, "yam": 9}, "yam"),
            ({"rye": 6}, "rye"),
        ),
        """
        amount | Return the value of item in stock. | stock[item]
        sold_out | Return whether the value of item in stock is zero. | stock[item] == 0
        is_available | Return whether the value of item in stock is greater than zero. | stock[item] > 0
        double_amount | Return twice the value of item in stock. | stock[item] * 2
        after_sale | Return the value of item in stock minus one. | stock[item] - 1
        all_amounts | Return the values of stock as a list. | list(stock.values())
        all_names | Return the keys of stock as a list. | list(stock.keys())
        pieces | Return the sum of the values of stock. | sum(stock.values())
        kinds | Return the number of keys in stock. | len(stock)
        has_plenty | Return whether the value of item in stock is over four. | stock[item] > 4
        entry | Return a list with item and its value in stock. | [item, stock[item]]
        most | Return the largest value of stock. | max(stock.values())
        """,
    ),
    "sentences": Family(
        "s",
        (
            ("It is late.",),
            ("Where are you?",),
            ("Stop now!",),
            ("the end",),
            ("A dog ran. It hid.",),
            ("We met, we ate, we left.",),
        ),
        """
        ends_with_dot | Return whether s ends with a dot. | s.endswith(".")
        is_question | Return whether s ends with a question mark. | s.endswith("?")
        has_comma | Return whether s contains a comma. | "," in s
        number_of_commas | Return the number of commas in s. | s.count(",")
        word_total | Return the number of words in s. | len(s.split())
        opening_word | Return the first word of s. | s.split()[0]
        closing_word | Return the last word of s. | s.split()[-1]
        without_dots | Return s without dots. | s.replace(".", "")
        as_question | Return s with a question mark at the end. | s + "?"
        quoted | Return s in double quotes. | '"' + s + '"'
        capitals | Return s in upper case. | s.upper()
        starts_upper | Return whether the first character of s is a capital letter. | s[0].isupper()
        """,
    ),
    "list_places": Family(
        "items, i",
        (
            ([4, 8, 6], 1),
            ([5, 1, 9, 2], 2),
            ([7, 7], 0),
            ([3, 0, 2, 11, 6], 3),
            ([10, 20, 30], 0),
            ([-1, 5, 2], 2),
        ),
        """
        item_at | Return the item at position i. | items[i]
        up_to_i | Return the items before position i. | items[:i]
        from_i | Return the items from position i on. | items[i:]
        item_doubled | Return twice the item at position i. | items[i] * 2
        without_i | Return the items without the one at position i. | items[:i] + items[i + 1:]
        is_last_place | Return whether i is the last position of items. | i == len(items) - 1
        is_first_place | Return whether i is zero. | i == 0
        item_plus_place | Return the item at position i plus i. | items[i] + i
        places_behind | Return how many items come after position i. | len(items) - i - 1
        sum_before | Return the sum of the items before position i. | sum(items[:i])
        is_largest_at | Return whether the item at position i is the largest. | items[i] == max(items)
        place_of_largest | Return the position of the largest item. | items.index(max(items))
        """,
    ),
}
