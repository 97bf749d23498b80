"""More families to learn from, about other things: the more different they are, the more carries over."""

from families import Family

LEARNED_TOO = {
    "temperatures": Family(
        "t",
        ((20,), (-5,), (0,), (37,), (100,), (12,)),
        """
        is_freezing | Return whether t is below zero. | t < 0
        is_boiling | Return whether t is at least 100. | t >= 100
        in_kelvin | Return t plus 273. | t + 273
        warmer | Return t plus 5. | t + 5
        colder | Return t minus 10. | t - 10
        is_mild | Return whether t is between 10 and 25. | 10 <= t <= 25
        times_nine | Return t times 9. | t * 9
        with_degree | Return t as text followed by "C". | str(t) + "C"
        at_most_thirty | Return t, but at most 30. | min(t, 30)
        at_least_zero | Return t, but at least 0. | max(t, 0)
        from_twenty | Return how far t is from 20. | abs(t - 20)
        is_zero_degrees | Return whether t equals 0. | t == 0
        """,
    ),
    "speeds": Family(
        "distance, hours",
        ((100, 2), (30, 3), (0, 4), (250, 5), (12, 1), (90, 6)),
        """
        speed | Return distance divided by hours. | distance / hours
        whole_speed | Return distance divided by hours, rounded down. | distance // hours
        double_distance | Return twice the distance. | distance * 2
        round_trip_hours | Return twice the hours. | hours * 2
        is_standing | Return whether the distance is zero. | distance == 0
        is_far | Return whether the distance is over 50. | distance > 50
        is_quick | Return whether distance divided by hours is over 40. | distance / hours > 40
        left_to_go | Return 300 minus the distance. | 300 - distance
        hours_and_rest | Return the hours plus one. | hours + 1
        trip | Return a list with the distance and the hours. | [distance, hours]
        distance_label | Return the distance as text followed by " km". | str(distance) + " km"
        sum_of_trip | Return the distance plus the hours. | distance + hours
        """,
    ),
    "booleans": Family(
        "flag",
        ((True,), (False,), (True,), (False,)),
        """
        opposite | Return the opposite of flag. | not flag
        as_number | Return 1 if flag is true and 0 if not. | int(flag)
        as_word | Return "on" if flag is true and "off" if not. | "on" if flag else "off"
        flag_twice | Return a list with flag two times. | [flag, flag]
        ten_or_zero | Return 10 if flag is true and 0 if not. | 10 if flag else 0
        sign_of_flag | Return 1 if flag is true and -1 if not. | 1 if flag else -1
        flag_text | Return flag as text. | str(flag)
        yes_no | Return "yes" if flag is true and "no" if not. | "yes" if flag else "no"
        flag_and_opposite | Return a list with flag and its opposite. | [flag, not flag]
        """,
    ),
    "years": Family(
        "year",
        ((2024,), (1999,), (2000,), (1850,), (2030,), (1975,)),
        """
        next_year | Return the year after year. | year + 1
        last_year | Return the year before year. | year - 1
        decade_later | Return year plus ten. | year + 10
        is_recent | Return whether year is at least 2000. | year >= 2000
        by_four_years | Return whether year is divisible by four. | year % 4 == 0
        short_year | Return the last two digits of year. | year % 100
        century | Return year divided by 100, rounded down. | year // 100
        years_since | Return 2050 minus year. | 2050 - year
        is_before_1900 | Return whether year is less than 1900. | year < 1900
        year_text | Return year as text. | str(year)
        two_years | Return a list with year and the year after it. | [year, year + 1]
        first_digit | Return the first digit of year as text. | str(year)[0]
        """,
    ),
    "digits_text": Family(
        "s",
        (("4051",), ("7",), ("120",), ("99",), ("3006",), ("58",)),
        """
        to_number | Return s as a whole number. | int(s)
        number_plus_one | Return s as a whole number plus one. | int(s) + 1
        twice_number | Return twice the whole number in s. | int(s) * 2
        digit_list | Return a list of the digits of s as numbers. | [int(c) for c in s]
        sum_of_digits | Return the sum of the digits of s. | sum(int(c) for c in s)
        has_zero_digit | Return whether s contains the digit 0. | "0" in s
        leading_digit | Return the first digit of s as a number. | int(s[0])
        trailing_digit | Return the last digit of s as a number. | int(s[-1])
        number_of_digits | Return the number of digits in s. | len(s)
        zeros_in | Return how often 0 occurs in s. | s.count("0")
        with_zero | Return s with a 0 at the end. | s + "0"
        is_large_number | Return whether the whole number in s is over 100. | int(s) > 100
        """,
    ),
    "colors": Family(
        "colors",
        (
            (["red", "green", "blue"],),
            (["white"],),
            (["black", "red"],),
            (["pink", "gray", "red", "teal"],),
            (["blue", "blue"],),
            (["gold", "green"],),
        ),
        """
        has_red | Return whether "red" is in colors. | "red" in colors
        color_count | Return the number of colors. | len(colors)
        first_color | Return the first color. | colors[0]
        last_color | Return the last color. | colors[-1]
        colors_in_capitals | Return a list of the colors in upper case. | [c.upper() for c in colors]
        with_black | Return the colors with "black" at the end. | colors + ["black"]
        different_colors | Return the number of different colors. | len(set(colors))
        without_red | Return the colors that are not "red". | [c for c in colors if c != "red"]
        color_text | Return the colors joined by slashes. | "/".join(colors)
        short_colors | Return the colors with at most four letters. | [c for c in colors if len(c) <= 4]
        colors_by_name | Return the colors sorted. | sorted(colors)
        color_letters | Return a list of the first letter of each color. | [c[0] for c in colors]
        """,
    ),
    "bank": Family(
        "balance, amount",
        ((100, 30), (50, 80), (0, 10), (75, 75), (20, 5), (300, 120)),
        """
        deposit | Return balance plus amount. | balance + amount
        withdraw | Return balance minus amount. | balance - amount
        can_pay | Return whether amount is at most balance. | amount <= balance
        is_overdrawn | Return whether balance minus amount is less than zero. | balance - amount < 0
        is_broke | Return whether balance is zero. | balance == 0
        after_fee | Return balance minus amount minus one. | balance - amount - 1
        double_balance | Return twice the balance. | balance * 2
        half_amount | Return half of the amount. | amount / 2
        rest_or_zero | Return balance minus amount, but at least 0. | max(balance - amount, 0)
        both_sums | Return a list with balance and amount. | [balance, amount]
        statement | Return balance as text with a euro sign behind it. | str(balance) + "€"
        larger_sum | Return the larger of balance and amount. | max(balance, amount)
        """,
    ),
    "sides": Family(
        "a, b, c",
        ((3, 4, 5), (2, 2, 3), (6, 6, 6), (5, 12, 13), (7, 1, 4), (9, 8, 2)),
        """
        outline | Return the sum of the three sides. | a + b + c
        longest_side | Return the longest of the three sides. | max(a, b, c)
        shortest_side | Return the shortest of the three sides. | min(a, b, c)
        is_even_sided | Return whether all three sides are equal. | a == b == c
        box_volume | Return the product of the three sides. | a * b * c
        side_list | Return a list of the three sides. | [a, b, c]
        sides_in_order | Return a sorted list of the three sides. | sorted([a, b, c])
        is_right_angled | Return whether a squared plus b squared is c squared. | a ** 2 + b ** 2 == c ** 2
        first_two_sides | Return the sum of a and b. | a + b
        mean_side | Return the mean of the three sides. | (a + b + c) / 3
        sum_of_squared_sides | Return the sum of the squares of the sides. | a ** 2 + b ** 2 + c ** 2
        c_is_longest | Return whether c is the longest side. | c == max(a, b, c)
        """,
    ),
    "emails": Family(
        "email",
        (("ann@mail.com",), ("bob@shop.org",), ("Eve.Lee@mail.com",), ("x@y.net",), ("info@shop.org",)),
        """
        user_of | Return the part of email before the @. | email.split("@")[0]
        domain_of | Return the part of email after the @. | email.split("@")[1]
        is_org | Return whether email ends with ".org". | email.endswith(".org")
        lower_email | Return email in lower case. | email.lower()
        email_length | Return the number of characters in email. | len(email)
        has_dot_com | Return whether email contains ".com". | ".com" in email
        email_parts | Return the parts of email around the @ as a list. | email.split("@")
        masked | Return email with the @ replaced by " at ". | email.replace("@", " at ")
        mail_link | Return email with "mailto:" in front. | "mailto:" + email
        starts_with_info | Return whether email starts with "info". | email.startswith("info")
        place_of_at | Return the position of the @ in email. | email.find("@")
        count_dots_in | Return the number of dots in email. | email.count(".")
        """,
    ),
    "dice": Family(
        "rolls",
        (([3, 6, 1],), ([6, 6],), ([2, 4, 5, 1],), ([1],), ([5, 3, 5],), ([4, 6, 2, 6],)),
        """
        sum_of_rolls | Return the sum of the rolls. | sum(rolls)
        count_sixes | Return how often 6 occurs in the rolls. | rolls.count(6)
        has_six | Return whether 6 is among the rolls. | 6 in rolls
        best_roll | Return the highest roll. | max(rolls)
        worst_roll | Return the lowest roll. | min(rolls)
        mean_roll | Return the mean of the rolls. | sum(rolls) / len(rolls)
        high_rolls | Return the rolls greater than 3. | [r for r in rolls if r > 3]
        low_rolls | Return the rolls of at most 3. | [r for r in rolls if r <= 3]
        all_high | Return whether all rolls are greater than 3. | all(r > 3 for r in rolls)
        any_one | Return whether any roll is 1. | any(r == 1 for r in rolls)
        rolls_sorted | Return the rolls sorted. | sorted(rolls)
        is_pair | Return whether some roll occurs twice. | len(set(rolls)) < len(rolls)
        """,
    ),
    "binary": Family(
        "bits",
        (("1010",), ("111",), ("0",), ("10001",), ("0110",), ("11",)),
        """
        count_ones | Return how often 1 occurs in bits. | bits.count("1")
        count_zeros | Return how often 0 occurs in bits. | bits.count("0")
        bit_length | Return the number of characters in bits. | len(bits)
        flipped | Return bits in reverse order. | bits[::-1]
        as_decimal | Return the number that bits is in base 2. | int(bits, 2)
        first_bit | Return the first character of bits. | bits[0]
        last_bit | Return the last character of bits. | bits[-1]
        is_all_ones | Return whether bits contains no 0. | "0" not in bits
        with_parity | Return bits with a 1 at the end. | bits + "1"
        bits_as_numbers | Return a list of the bits as numbers. | [int(b) for b in bits]
        is_even_number | Return whether bits ends with 0. | bits.endswith("0")
        padded | Return bits with a 0 in front. | "0" + bits
        """,
    ),
    "ages": Family(
        "ages",
        (([30, 12, 45],), ([18, 17],), ([70],), ([5, 9, 61, 33],), ([21, 21],), ([40, 8, 16],)),
        """
        oldest | Return the highest age. | max(ages)
        youngest | Return the lowest age. | min(ages)
        adults | Return the ages of at least 18. | [a for a in ages if a >= 18]
        children | Return the ages below 18. | [a for a in ages if a < 18]
        count_adults | Return how many ages are at least 18. | sum(a >= 18 for a in ages)
        all_adults | Return whether all ages are at least 18. | all(a >= 18 for a in ages)
        mean_age | Return the mean of the ages. | sum(ages) / len(ages)
        next_year_ages | Return a list of each age plus one. | [a + 1 for a in ages]
        age_gap | Return the highest age minus the lowest. | max(ages) - min(ages)
        ages_from_oldest | Return the ages from highest to lowest. | sorted(ages, reverse=True)
        group_size | Return the number of ages. | len(ages)
        any_senior | Return whether any age is over 65. | any(a > 65 for a in ages)
        """,
    ),
    "sets": Family(
        "a, b",
        (
            ([1, 2, 3], [2, 3, 4]),
            ([5, 1], [7]),
            ([2, 2, 6], [6, 2]),
            ([9, 4, 8], [8]),
            ([3], [3]),
            ([1, 7], [2, 7, 5]),
        ),
        """
        common | Return a sorted list of the values that are in a and in b. | sorted(set(a) & set(b))
        in_any | Return a sorted list of the values that are in a or in b. | sorted(set(a) | set(b))
        only_first | Return a sorted list of the values of a that are not in b. | sorted(set(a) - set(b))
        only_second | Return a sorted list of the values of b that are not in a. | sorted(set(b) - set(a))
        share_any | Return whether some value is in a and in b. | len(set(a) & set(b)) > 0
        same_values | Return whether a and b have the same values. | set(a) == set(b)
        count_common | Return the number of values that are in both. | len(set(a) & set(b))
        distinct_in_a | Return the number of different values in a. | len(set(a))
        a_within_b | Return whether every value of a is in b. | all(x in b for x in a)
        longer_one | Return the longer of a and b, or a if they are equal. | a if len(a) >= len(b) else b
        """,
    ),
    "numbers_as_text": Family(
        "n",
        ((5,), (42,), (0,), (-7,), (100,), (13,)),
        """
        as_text | Return n as text. | str(n)
        with_hash | Return n as text with # in front. | "#" + str(n)
        with_percent | Return n as text with % behind it. | str(n) + "%"
        in_parentheses | Return n as text in round brackets. | "(" + str(n) + ")"
        text_length | Return the number of characters of n as text. | len(str(n))
        twice_as_text | Return n as text, repeated twice. | str(n) * 2
        is_text_short | Return whether n as text has one character. | len(str(n)) == 1
        starts_with_one | Return whether n as text starts with 1. | str(n).startswith("1")
        item_name | Return "item " followed by n. | "item " + str(n)
        as_decimal_text | Return n as text with ".0" at the end. | str(n) + ".0"
        """,
    ),
    "circles": Family(
        "r",
        ((2,), (5,), (1,), (10,), (0,), (7,)),
        """
        diameter | Return twice r. | 2 * r
        rough_area | Return 3 times r squared. | 3 * r ** 2
        rough_outline | Return 6 times r. | 6 * r
        surrounding_square | Return the area of a square with side 2 times r. | (2 * r) ** 2
        is_point | Return whether r is zero. | r == 0
        grown | Return r plus one. | r + 1
        half_radius | Return half of r. | r / 2
        is_big | Return whether r is greater than 4. | r > 4
        radius_and_diameter | Return a list with r and twice r. | [r, 2 * r]
        ring | Return r plus 1 squared minus r squared. | (r + 1) ** 2 - r ** 2
        """,
    ),
    "votes": Family(
        "yes, no",
        ((10, 7), (3, 3), (0, 5), (12, 1), (8, 9), (4, 0)),
        """
        is_accepted | Return whether yes is greater than no. | yes > no
        is_tie | Return whether yes equals no. | yes == no
        all_votes | Return the sum of yes and no. | yes + no
        majority | Return yes minus no. | yes - no
        margin | Return the absolute difference of yes and no. | abs(yes - no)
        share_of_yes | Return yes divided by the sum of yes and no. | yes / (yes + no)
        winner | Return "yes" if yes is greater than no, else "no". | "yes" if yes > no else "no"
        is_unanimous | Return whether no is zero. | no == 0
        more_votes | Return the larger of yes and no. | max(yes, no)
        result | Return yes and no as text with a colon between them. | str(yes) + ":" + str(no)
        """,
    ),
    "queues": Family(
        "queue, name",
        (
            (["ann", "bob"], "cy"),
            (["dan"], "eve"),
            (["flo", "gus", "hal"], "gus"),
            (["ida", "jim"], "ida"),
            (["kim"], "kim"),
        ),
        """
        enqueue | Return queue with name at the end. | queue + [name]
        jump_in | Return a list with name first and then the queue. | [name] + queue
        is_waiting | Return whether name is in queue. | name in queue
        is_next | Return whether name is the first in queue. | queue[0] == name
        leave | Return the queue without name. | [x for x in queue if x != name]
        serve_one | Return the queue without its first item. | queue[1:]
        length_with | Return the length of queue plus one. | len(queue) + 1
        next_one | Return the first item of queue. | queue[0]
        how_often | Return how often name occurs in queue. | queue.count(name)
        is_alone | Return whether queue has one item. | len(queue) == 1
        """,
    ),
    "signs": Family(
        "x, y",
        ((3, -2), (-4, -5), (0, 6), (7, 7), (-1, 8), (2, 9)),
        """
        x_is_positive | Return whether x is greater than zero. | x > 0
        both_negative | Return whether x and y are both less than zero. | x < 0 and y < 0
        y_minus_x | Return y minus x. | y - x
        product_of_both | Return x times y. | x * y
        negated_sum | Return the negative of the sum of x and y. | -(x + y)
        larger_by_size | Return the larger of the absolute values of x and y. | max(abs(x), abs(y))
        sum_of_absolutes | Return the sum of the absolute values of x and y. | abs(x) + abs(y)
        swapped_values | Return a list with y first and then x. | [y, x]
        is_sum_positive | Return whether the sum of x and y is greater than zero. | x + y > 0
        x_squared_plus_y | Return x squared plus y. | x ** 2 + y
        same_value | Return whether x equals y. | x == y
        opposite_values | Return a list with the negatives of x and y. | [-x, -y]
        """,
    ),
    "letters": Family(
        "letters",
        ((["a", "b", "c"],), (["x"],), (["e", "a"],), (["b", "b", "d"],), (["o", "u", "k", "z"],)),
        """
        spelled | Return the letters joined to one text. | "".join(letters)
        dashed | Return the letters joined by dashes. | "-".join(letters)
        letter_count | Return the number of letters. | len(letters)
        capital_letters | Return a list of the letters in upper case. | [c.upper() for c in letters]
        has_letter_a | Return whether "a" is among the letters. | "a" in letters
        letters_backwards | Return the letters in reverse order. | letters[::-1]
        vowels_only | Return the letters that are vowels. | [c for c in letters if c in "aeiou"]
        doubled_letters | Return a list of each letter twice in a row. | [c * 2 for c in letters]
        letter_codes | Return a list of the character codes of the letters. | [ord(c) for c in letters]
        sorted_letters | Return the letters sorted. | sorted(letters)
        unique_letters | Return the number of different letters. | len(set(letters))
        letters_and_z | Return the letters with "z" at the end. | letters + ["z"]
        """,
    ),
    "lines": Family(
        "line",
        (("a,b,c",), ("one,two",), ("x",), ("4,5,6,7",), ("red,,blue",), ("k,k",)),
        """
        fields | Return the parts of line between commas as a list. | line.split(",")
        field_count | Return the number of parts between commas. | len(line.split(","))
        first_field | Return the part of line before the first comma. | line.split(",")[0]
        last_field | Return the part of line after the last comma. | line.split(",")[-1]
        comma_count | Return the number of commas in line. | line.count(",")
        with_semicolons | Return line with commas replaced by semicolons. | line.replace(",", ";")
        without_commas | Return line without commas. | line.replace(",", "")
        is_single | Return whether line contains no comma. | "," not in line
        fields_sorted | Return the parts between commas sorted. | sorted(line.split(","))
        extended | Return line with ",end" behind it. | line + ",end"
        """,
    ),
    "gaps": Family(
        "numbers",
        (([1, 4, 9],), ([5, 2],), ([7, 7, 7],), ([0, 10, 20, 30],), ([3, -3],), ([8, 6, 1],)),
        """
        first_minus_last | Return the first number minus the last. | numbers[0] - numbers[-1]
        first_gap | Return the second number minus the first. | numbers[1] - numbers[0]
        without_ends | Return the numbers without the first and the last. | numbers[1:-1]
        largest_plus_smallest | Return the sum of the largest and the smallest. | max(numbers) + min(numbers)
        from_first | Return a list of each number minus the first. | [n - numbers[0] for n in numbers]
        over_five | Return how many numbers are greater than five. | sum(n > 5 for n in numbers)
        halved | Return a list of half of each number. | [n / 2 for n in numbers]
        as_texts | Return a list of the numbers as texts. | [str(n) for n in numbers]
        product_of_ends | Return the first number times the last. | numbers[0] * numbers[-1]
        starts_with_largest | Return whether the first number is the largest. | numbers[0] == max(numbers)
        every_second | Return every second number, from the first on. | numbers[::2]
        sum_without_first | Return the sum of the numbers without the first. | sum(numbers[1:])
        """,
    ),
    "matches": Family(
        "home, away",
        ((2, 1), (0, 0), (1, 3), (4, 4), (5, 2), (0, 1)),
        """
        home_wins | Return whether home is greater than away. | home > away
        away_wins | Return whether away is greater than home. | away > home
        is_draw | Return whether home equals away. | home == away
        goals | Return the sum of home and away. | home + away
        goal_difference | Return home minus away. | home - away
        score_text | Return home and away as text with a dash between them. | str(home) + "-" + str(away)
        home_points | Return 3 if home is greater than away, else 0. | 3 if home > away else 0
        many_goals | Return whether home and away together are over four. | home + away > 4
        no_goals | Return whether home and away are both zero. | home == 0 and away == 0
        other_way | Return a list with away first and then home. | [away, home]
        """,
    ),
    "settings": Family(
        "options, key",
        (
            ({"size": 3, "depth": 5}, "size"),
            ({"a": 1}, "b"),
            ({"width": 7, "height": 2}, "height"),
            ({"x": 0}, "x"),
            ({"low": 4, "high": 9, "mid": 6}, "mid"),
        ),
        """
        has_key | Return whether key is in options. | key in options
        get_or_zero | Return the value of key in options, or 0. | options.get(key, 0)
        is_missing | Return whether key is not in options. | key not in options
        option_names | Return the keys of options as a list. | list(options)
        option_count | Return the number of keys in options. | len(options)
        option_sum | Return the sum of the values of options. | sum(options.values())
        names_in_order | Return the keys of options sorted. | sorted(options)
        highest_option | Return the largest value of options. | max(options.values())
        values_doubled | Return a list of each value of options times two. | [v * 2 for v in options.values()]
        get_or_key | Return the value of key in options, or the key itself. | options.get(key, key)
        """,
    ),
    "words_and_counts": Family(
        "word, n",
        (("cat", 2), ("a", 4), ("tree", 1), ("go", 3), ("seven", 5), ("hi", 1)),
        """
        say | Return the word n times. | word * n
        say_with_spaces | Return the word n times, joined by spaces. | " ".join([word] * n)
        word_list_of | Return a list with the word n times. | [word] * n
        is_length_n | Return whether the word has n characters. | len(word) == n
        is_longer | Return whether the word has more than n characters. | len(word) > n
        word_and_n | Return the word followed by n. | word + str(n)
        letters_in_total | Return the length of the word times n. | len(word) * n
        head | Return the first n characters of the word. | word[:n]
        with_exclamations | Return the word followed by n exclamation marks. | word + "!" * n
        length_minus_n | Return the length of the word minus n. | len(word) - n
        """,
    ),
}
