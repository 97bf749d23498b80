"""The HTTP parser, or the word which package is missing."""

from graftwork.records.errors import EnvironmentLacks, pip_install

try:
    import httptools
except ImportError as error:
    raise EnvironmentLacks(
        "the package httptools is not installed",
        why="serving parses HTTP with it",
        fix=pip_install("serve"),
    ) from error

__all__ = ["httptools"]
