"""Families by which the settings of this example were chosen. They are neither trained on nor held out."""

from families import Family

DEVELOP = {
    "times": Family(
        "hours, minutes",
        ((2, 30), (0, 45), (7, 5), (12, 0), (23, 59), (1, 15)),
        """
        in_minutes | Return the time in minutes. | hours * 60 + minutes
        in_seconds | Return the time in seconds. | hours * 3600 + minutes * 60
        is_full_hour | Return whether minutes is zero. | minutes == 0
        is_morning | Return whether hours is less than 12. | hours < 12
        next_hour | Return the hour after hours. | hours + 1
        rest_of_hour | Return how many minutes are left to the full hour. | 60 - minutes
        clock_list | Return a list with hours and minutes. | [hours, minutes]
        clock_text | Return hours and minutes as text with a colon between. | str(hours) + ":" + str(minutes)
        is_midday | Return whether hours is 12. | hours == 12
        later_half | Return whether minutes is at least 30. | minutes >= 30
        hours_left | Return 24 minus hours. | 24 - hours
        both_added | Return the sum of hours and minutes. | hours + minutes
        """,
    ),
    "averages": Family(
        "values",
        (([2, 4, 9],), ([5, 5],), ([1, 2, 3, 10],), ([-3, 3, 6],), ([8],), ([0, 7, 2, 7, 4],)),
        """
        value_mean | Return the mean of the values. | sum(values) / len(values)
        value_middle | Return the item in the middle of the sorted values. | sorted(values)[len(values) // 2]
        value_range | Return the largest value minus the smallest. | max(values) - min(values)
        above_two | Return the values greater than two. | [v for v in values if v > 2]
        halves | Return a list of half of each value. | [v / 2 for v in values]
        tenfold | Return a list of each value times ten. | [v * 10 for v in values]
        value_texts | Return a list of the values as texts. | [str(v) for v in values]
        value_set | Return the different values sorted. | sorted(set(values))
        number_different | Return the number of different values. | len(set(values))
        first_and_last | Return a list with the first and the last value. | [values[0], values[-1]]
        total_over_nine | Return whether the sum of the values is over nine. | sum(values) > 9
        one_more | Return the values with a zero at the end. | values + [0]
        """,
    ),
    "names": Family(
        "first, last",
        (("Ann", "Lee"), ("bob", "Stone"), ("Eva", "Ek"), ("Tim", "tall"), ("Zoe", "Zimmer"), ("Al", "Poe")),
        """
        full_name | Return first and last with a space between them. | first + " " + last
        last_first | Return last, a comma, a space and then first. | last + ", " + first
        both_initials | Return the first letters of first and last together. | first[0] + last[0]
        greeting | Return "Hello " followed by first. | "Hello " + first
        name_length | Return the length of first and last together. | len(first) + len(last)
        longer_last | Return whether last is longer than first. | len(last) > len(first)
        same_initial | Return whether first and last start with the same letter. | first[0] == last[0]
        loud_last | Return last in upper case. | last.upper()
        name_pair | Return a list with first and last. | [first, last]
        login | Return first and last in lower case with a dot between. | first.lower() + "." + last.lower()
        short_first | Return the first two characters of first. | first[:2]
        is_capitalized | Return whether first starts with a capital letter. | first[0].isupper()
        """,
    ),
    "remainders": Family(
        "a, b",
        ((7, 3), (10, 5), (9, 4), (20, 6), (15, 15), (8, 3)),
        """
        quotient | Return a divided by b, rounded down. | a // b
        remainder | Return the remainder of a divided by b. | a % b
        goes_into | Return whether b divides a without remainder. | a % b == 0
        sum_and_product | Return a list of the sum and the product of a and b. | [a + b, a * b]
        ratio | Return a divided by b. | a / b
        power | Return a to the power of b. | a ** b
        product_plus_one | Return the product of a and b plus one. | a * b + 1
        mean_down | Return the mean of a and b, rounded down. | (a + b) // 2
        difference_squared | Return the square of the difference of a and b. | (a - b) ** 2
        last_digit_of_sum | Return the last digit of the sum of a and b. | (a + b) % 10
        minus_twice_b | Return a minus twice b. | a - 2 * b
        range_between | Return the list of numbers from b to a - 1. | list(range(b, a))
        """,
    ),
    "records": Family(
        "person",
        (
            ({"name": "Ann", "age": 30},),
            ({"name": "Bo", "age": 17},),
            ({"name": "Cleo", "age": 65},),
            ({"name": "Dan", "age": 4},),
            ({"name": "Eve", "age": 18},),
            ({"name": "Finn", "age": 41},),
        ),
        """
        name_of | Return the name of the person. | person["name"]
        age_of | Return the age of the person. | person["age"]
        is_adult | Return whether the age of the person is at least 18. | person["age"] >= 18
        age_next_year | Return the age of the person plus one. | person["age"] + 1
        name_in_capitals | Return the name of the person in upper case. | person["name"].upper()
        name_size | Return the length of the name of the person. | len(person["name"])
        is_eve | Return whether the name of the person is "Eve". | person["name"] == "Eve"
        years_to_hundred | Return 100 minus the age of the person. | 100 - person["age"]
        name_and_age | Return a list with the name and the age. | [person["name"], person["age"]]
        starts_with_b | Return whether the name starts with "B". | person["name"].startswith("B")
        double_age | Return twice the age of the person. | person["age"] * 2
        age_is_even | Return whether the age of the person is even. | person["age"] % 2 == 0
        """,
    ),
    "word_and_letter": Family(
        "word, letter",
        (("banana", "a"), ("tree", "e"), ("sky", "o"), ("loop", "o"), ("kiosk", "k"), ("mud", "d")),
        """
        count_letter | Return how often the letter occurs in the word. | word.count(letter)
        has_letter | Return whether the letter is in the word. | letter in word
        starts_with_letter | Return whether the word starts with the letter. | word.startswith(letter)
        ends_with_letter | Return whether the word ends with the letter. | word.endswith(letter)
        remove_letter | Return the word without the letter. | word.replace(letter, "")
        star_letter | Return the word with the letter replaced by a star. | word.replace(letter, "*")
        add_letter | Return the word with the letter at the end. | word + letter
        letter_first | Return the word with the letter in front. | letter + word
        find_letter | Return the position of the letter in the word, or -1. | word.find(letter)
        split_at_letter | Return the word split at the letter as a list. | word.split(letter)
        surround | Return the word between two of the letters. | letter + word + letter
        often | Return whether the letter occurs more than once in the word. | word.count(letter) > 1
        """,
    ),
    "steps": Family(
        "start, step",
        ((2, 3), (0, 5), (10, -2), (7, 1), (-4, 4), (100, 10)),
        """
        after_one | Return start plus step. | start + step
        after_two | Return start plus twice step. | start + 2 * step
        after_ten | Return start plus ten times step. | start + 10 * step
        before | Return start minus step. | start - step
        first_two_steps | Return a list of start and start plus step. | [start, start + step]
        is_rising | Return whether step is greater than zero. | step > 0
        sum_of_two | Return the sum of start and the number one step after it. | start + start + step
        sizes | Return a list with start and step. | [start, step]
        step_size | Return the absolute value of step. | abs(step)
        reaches_zero | Return whether start plus step is zero. | start + step == 0
        scaled | Return start times step. | start * step
        opposite_step | Return start and the negative of step as a list. | [start, -step]
        """,
    ),
    "nested_words": Family(
        "groups",
        (
            ([["a", "b"], ["c"]],),
            ([["one"], ["two", "three"]],),
            ([["x", "y", "z"]],),
            ([["sun"], ["moon"], ["star"]],),
            ([["red", "blue"], ["green", "gray"]],),
            ([["p"], ["q", "r"], ["s", "t", "u"]],),
        ),
        """
        number_of_groups | Return the number of groups. | len(groups)
        group_sizes | Return a list of the length of each group. | [len(g) for g in groups]
        first_words | Return a list of the first word of each group. | [g[0] for g in groups]
        last_words | Return a list of the last word of each group. | [g[-1] for g in groups]
        all_words | Return all words of all groups in one list. | [w for g in groups for w in g]
        number_of_words | Return the number of words in all groups. | sum(len(g) for g in groups)
        largest_group | Return the longest group. | max(groups, key=len)
        joined_groups | Return a list of each group joined by spaces. | [" ".join(g) for g in groups]
        opening_group | Return the first group. | groups[0]
        groups_backwards | Return the groups in reverse order. | groups[::-1]
        has_one_group | Return whether there is exactly one group. | len(groups) == 1
        first_group_size | Return the number of words in the first group. | len(groups[0])
        """,
    ),
}
