"""What changed between two specifications, node by node. Pure."""

from typing import Any, Literal

from graftwork.components.spec.tree import SpecNode, SpecTree
from graftwork.records.base import Record

Change = Literal["added", "removed", "changed", "moved"]


class SpecChange(Record):
    kind: Change
    node: str
    name: str
    key: str = ""
    """What of a changed node is different."""
    old: Any = None
    new: Any = None


def diff_trees(old: SpecTree, new: SpecTree) -> list[SpecChange]:
    """Nodes are matched by id. A node whose parent is another one is moved."""
    before, after = _by_id(old), _by_id(new)
    changes = []
    for each, (node, parent) in before.items():
        if each not in after:
            changes.append(SpecChange(kind="removed", node=each, name=node.name))
            continue
        other, new_parent = after[each]
        if parent != new_parent:
            changes.append(
                SpecChange(kind="moved", node=each, name=other.name, key="parent", old=parent, new=new_parent)
            )
        changes += _diff_node(each, node, other)
    changes += [
        SpecChange(kind="added", node=each, name=node.name)
        for each, (node, _) in after.items()
        if each not in before
    ]
    return changes


def _by_id(tree: SpecTree) -> dict[str, tuple[SpecNode, str]]:
    """Nodes without an id, or with one that is used twice, are known by their place."""
    found: dict[str, tuple[SpecNode, str]] = {}
    waiting = [(tree.root, "", "0")]
    while waiting:
        node, parent, place = waiting.pop(0)
        key = node.id if node.id and node.id not in found else f"{node.id}@{place}"
        found[key] = (node, parent)
        waiting += [(child, key, f"{place}.{n}") for n, child in enumerate(node.children)]
    return found


def _diff_node(key: str, old: SpecNode, new: SpecNode) -> list[SpecChange]:
    one = {"name": old.name, "body": old.body, "tail": old.tail, **_flatten(old.fields)}
    other = {"name": new.name, "body": new.body, "tail": new.tail, **_flatten(new.fields)}
    return [
        SpecChange(kind="changed", node=key, name=new.name, key=name, old=one.get(name), new=other.get(name))
        for name in dict.fromkeys((*one, *other))
        if one.get(name) != other.get(name) or (name in one) != (name in other)
    ]


def _flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            found |= _flatten(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
