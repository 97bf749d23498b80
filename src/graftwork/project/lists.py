"""One text where a list of texts is wanted: `logs: logs/*.jsonl` means a list of one.

In: what YAML read, and the settings class that it is meant for. Out: the same with such texts in
lists. Does not check anything: what is wrong stays as it is, and is refused by the class.
"""

from typing import Any, get_args, get_origin

from pydantic import BaseModel


def list_single_texts(content: dict[Any, Any], owner: type[BaseModel]) -> dict[Any, Any]:
    return {
        key: _mend(value, owner.model_fields[key].annotation) if key in owner.model_fields else value
        for key, value in content.items()
    }


def _mend(value: Any, annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list_single_texts(value, annotation) if isinstance(value, dict) else value
    inner = get_args(annotation)
    if get_origin(annotation) is tuple and inner == (str, ...):
        return [value] if isinstance(value, str) else value
    if get_origin(annotation) is tuple and isinstance(value, list):
        return [_mend(one, inner[0]) for one in value] if len(inner) == 2 and inner[1] is ... else value
    if get_origin(annotation) is dict and isinstance(value, dict):
        return {key: _mend(one, inner[1]) for key, one in value.items()}
    # One of several kinds, most often something or nothing: the first that mends it.
    return next((made for one in inner if (made := _mend(value, one)) is not value), value)
