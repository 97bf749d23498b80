"""Which rows are never divided between splits, in words: what data.split_by adds to the question."""


def say_together(split_by: str) -> str:
    """What rows of one group do, as a verb: rows that ask alike stay together in any case."""
    return {
        "question": "ask alike",
        "session": "ask alike or are of one session",
    }.get(split_by, f"ask alike or have the same `{split_by}`")


def say_like_another(split_by: str, other: str) -> str:
    """The same of one row and another: `ask what a training row asks`."""
    asks = f"ask what {other} asks"
    return {
        "question": asks,
        "session": f"{asks} or are of its session",
    }.get(split_by, f"{asks} or have its `{split_by}`")
