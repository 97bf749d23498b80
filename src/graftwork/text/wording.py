"""Counts and times as people read them. Pure."""


def plural(count: float, noun: str) -> str:
    """1 row, 2,000 rows, 1.5 years."""
    return f"{count:{',' if isinstance(count, int) else 'g'}} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """50 ms, 5.0 s, 42 s, 1 min 05 s or 2 h 01 min."""
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    # Rounded first: no minute has 60 seconds.
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
