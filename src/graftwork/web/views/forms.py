"""Values in the address of a page: numbers and options, each with a default."""

from starlette.requests import Request


def number_in(request: Request, name: str, default: int = 1) -> int:
    """A whole number of the address; the default where it is none."""
    try:
        return int(request.query_params.get(name, ""))
    except ValueError:
        return default


def text_in(request: Request, name: str, *, longest: int = 400) -> str:
    return request.query_params.get(name, "").strip()[:longest]
