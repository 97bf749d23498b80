"""Findings about a specification, and which of its requirements can be run.

Input: a tree and its cases. Output: a report of findings by line, and of requirements with and without a
case. Changes nothing and reports everything.
"""

import json
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.components.cases import (
    CaseFile,
    ComponentCases,
    case_from_requirement,
    cases_path,
    covered_by,
    read_cases,
)
from graftwork.components.plan import (
    component_nodes,
    dependencies_by_id,
    describe_cycle,
    find_cycle,
    function_of,
    resolve_names,
    to_identifier,
)
from graftwork.components.read import ENDINGS, read_spec
from graftwork.components.tree import (
    UNNAMED,
    Dialect,
    Level,
    SpecFinding,
    SpecNode,
    SpecTree,
    dependencies_of,
    parameters_of,
    requirements_of,
    snake_case,
    unread_fields,
)
from graftwork.components.types import read_type
from graftwork.files.disk import file_digest
from graftwork.records.base import Record
from graftwork.records.errors import EXIT_DONE, EXIT_NEGATIVE_RESULT, GraftError, UserError

FIXES = {
    "id_missing": "write an id that no other node has, in quotes",
    "id_twice": "give one of the nodes another id",
    "id_not_quoted": 'write the id in quotes: id: "1.10"',
    "key_twice": "remove one of the two",
    "name_missing": "write a name; it becomes the name of the function",
    "name_taken": "rename one of the nodes, or write `function` in the cases",
    "version_missing": "write a version at the root",
    "dangling": "correct the id, or remove it",
    "cycle": "remove one of these dependencies",
    "field_unread": "write it in one of the forms that docs/components.md shows",
    "parameter_renamed": "write a name that Python accepts",
    "type_missing": "write the type after the name",
    "type_unknown": "write a Python type, such as str, int, list[str] or dict",
    "type_foreign": "nothing is wrong; the Python type is what components are asked for",
    "case_dangling": "correct the id in the file of cases, in quotes",
    "case_arguments": "correct the arguments of the call, or the inputs of the node",
    "covers_nothing": "copy the requirement as it is written in the specification",
    "no_cases": "write calls or properties for it in NAME.cases.yaml, or a requirement that is a call",
    "misplaced": "number the heading below its parent",
    "number_gap": "number the headings in order",
    "numbered": "write numbers: *1, *1**1",
    "file_twice": "remove one of the two files",
}
"""What to do about a finding, by its rule."""
_REFERENCE = re.compile(r"\[cross_reference:\s*([^\]]+)\]")
_STARS = re.compile(r"\*+")


class RequirementState(Record):
    """A requirement, and whether a case decides it."""

    node: str
    line: int
    text: str
    executable: bool


class SpecReport(Record):
    """One file: its content and the findings."""

    file: str
    dialect: Dialect
    nodes: int
    leaves: int
    components_with_cases: int
    findings: tuple[SpecFinding, ...]
    requirements: tuple[RequirementState, ...]

    @property
    def errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)


def check_file(path: Path, cases: Path | None = None) -> SpecReport:
    tree = read_spec(path)
    case_file = read_cases(cases or cases_path(path))
    unsorted = [*tree.findings, *check_tree(tree, case_file)]
    findings = sorted(unsorted, key=lambda finding: (finding.line, finding.code))
    return SpecReport(
        file=str(path),
        dialect=tree.dialect,
        nodes=sum(1 for _ in tree.walk()),
        leaves=len(tree.leaves()),
        components_with_cases=len(case_file.components),
        findings=tuple(
            finding.model_copy(update={"file": str(path), "fix": FIXES.get(finding.code, "")})
            for finding in findings
        ),
        requirements=tuple(list_requirements(tree, case_file)),
    )


@dataclass(frozen=True)
class CheckedSpecs:
    """Several files: their reports, files that are not specifications, and copies of others."""

    reports: tuple[SpecReport, ...]
    refused: tuple[GraftError, ...]
    duplicates: tuple[SpecFinding, ...]
    exit_code: int

    def as_json(self) -> dict[str, Any]:
        return {
            "files": [report.model_dump(mode="json") for report in self.reports],
            "refused": [error.as_json() for error in self.refused],
            "duplicates": [finding.model_dump(mode="json") for finding in self.duplicates],
        }


def check_files(files: Sequence[Path], cases: Path | None = None) -> CheckedSpecs:
    """Check files, and all specifications in folders. A single file that is not a specification raises its
    error.
    """
    paths = [path for file in files for path in _list_specs(file) if not path.name.endswith(".cases.yaml")]
    if not paths:
        raise UserError(
            "there is no specification here",
            why=f"no file ends in {', '.join(ENDINGS)}",
            fix="specify a file",
            where=", ".join(map(str, files)),
        )
    reports, refused, is_wrong = [], [], False
    for path in paths:
        try:
            reports.append(check_file(path, cases))
        except GraftError as error:
            if len(paths) == 1:
                raise
            refused.append(error)
            # YAML in a folder may be something else.
            is_wrong = is_wrong or path in files or path.suffix not in (".yaml", ".yml")
    duplicates = tuple(find_duplicates([path for path in paths if path.is_file()]))
    exit_code = EXIT_NEGATIVE_RESULT if is_wrong or any(report.errors for report in reports) else EXIT_DONE
    return CheckedSpecs(tuple(reports), tuple(refused), duplicates, exit_code)


def _list_specs(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix in ENDINGS) if path.is_dir() else [path]


def find_duplicates(paths: list[Path]) -> Iterator[SpecFinding]:
    """Files with the same bytes as an earlier one."""
    first: dict[str, Path] = {}
    for path in paths:
        original = first.setdefault(file_digest(path), path)
        if original is not path:
            message = f"the file has the same bytes as {original}"
            yield SpecFinding(
                level="warning",
                code="file_twice",
                node="",
                line=1,
                message=message,
                fix=FIXES["file_twice"],
                file=str(path),
            )


def check_tree(tree: SpecTree, cases: CaseFile) -> Iterator[SpecFinding]:
    yield from _check_ids(tree)
    yield from _check_names(tree, cases)
    yield from _check_fields(tree)
    yield from _check_references(tree)
    nodes = {node.id: node for node in component_nodes(tree, cases)}
    if cycle := find_cycle(dependencies_by_id(tree, cases)):
        node = nodes[cycle[0]]
        line = next((line for name, line in dependencies_of(node) if name == cycle[1]), None)
        yield _finding("error", "cycle", node, describe_cycle(cycle), line)
    yield from _check_types(tree)
    yield from _check_cases(tree, cases)


def _finding(level: Level, code: str, node: SpecNode, message: str, line: int | None = None) -> SpecFinding:
    return SpecFinding(level=level, code=code, node=node.id, line=line or node.line, message=message)


def _check_ids(tree: SpecTree) -> Iterator[SpecFinding]:
    counted = Counter(node.id for node in tree.walk() if node.id)
    for node in tree.walk():
        if not node.id:
            name = f" ({node.name})" if node.name else ""
            yield _finding("error", "id_missing", node, f"the node{name} has no id")
        elif counted[node.id] > 1:
            yield _finding("error", "id_twice", node, f"the id {node.id} is used {counted[node.id]} times")
        if not node.name:
            yield _finding("warning", "name_missing", node, f"the node {node.id or UNNAMED} has no name")
    if tree.dialect == "yaml" and "version" not in tree.root.fields:
        yield _finding("note", "version_missing", tree.root, "the root has no version")


def _check_names(tree: SpecTree, cases: CaseFile) -> Iterator[SpecFinding]:
    """Each component is a module of the package: names must differ, and must not be Python keywords."""
    by_function: dict[str, SpecNode] = {}
    for node in component_nodes(tree, cases):
        function = function_of(node, cases.components.get(node.id, ComponentCases()))
        namesake = by_function.setdefault(function, node)
        if keyword.iskeyword(function):
            yield _finding(
                "error", "name_taken", node, f"{function} is a Python keyword and cannot name a function"
            )
        elif namesake is not node:
            message = f"the components {namesake.id} and {node.id} are both called {function}"
            yield _finding("error", "name_taken", node, message)


def _check_fields(tree: SpecTree) -> Iterator[SpecFinding]:
    for node in tree.walk():
        for message, line in unread_fields(node):
            level: Level = "error" if message.startswith("`children`") else "warning"
            yield _finding(level, "field_unread", node, message, line)
        for parameter in parameters_of(node, "inputs"):
            if (name := to_identifier(parameter.name)) != parameter.name:
                message = f"the input {parameter.name!r} is not a Python name: it becomes {name}"
                yield _finding("warning", "parameter_renamed", node, message, parameter.line)


def _check_references(tree: SpecTree) -> Iterator[SpecFinding]:
    names = resolve_names(tree)
    for node in tree.walk():
        for name, line in dependencies_of(node):
            if name not in names:
                message = f"{node.id or UNNAMED} depends on {name}, which is not a node of this tree"
                yield _finding("warning", "dangling", node, message, line)
        for reference in _REFERENCE.finditer(node.tail + "\n" + node.body):
            target = _STARS.sub(".", reference[1].strip()).strip(".")
            if target not in names:
                line = node.line + (node.tail + "\n" + node.body)[: reference.start()].count("\n")
                yield _finding(
                    "warning", "dangling", node, f"the reference {reference[1].strip()} has no target", line
                )
    stages = tree.root.fields.get("stages")
    for stage, content in stages.items() if isinstance(stages, dict) else ():
        listed = content.get("components") if isinstance(content, dict) else None
        for number, name in enumerate(listed if isinstance(listed, list) else []):
            if str(name) not in names:
                line = tree.root.line_of("stages", stage, "components", str(number))
                message = f"{stage} names the component {name}, which is not a node of this tree"
                yield _finding("error", "dangling", tree.root, message, line)


def _check_types(tree: SpecTree) -> Iterator[SpecFinding]:
    for node in tree.walk():
        for key in ("inputs", "outputs"):
            for parameter in parameters_of(node, key):
                if not parameter.type:
                    yield _finding(
                        "note", "type_missing", node, f"{key}: {parameter.name} has no type", parameter.line
                    )
                    continue
                shape, foreign = read_type(parameter.type)
                subject = f"{key}: {parameter.name}"
                if shape is None:
                    message = f"{subject} has the type `{parameter.type}`, which no Python type is known for"
                    yield _finding("warning", "type_unknown", node, message, parameter.line)
                elif foreign:
                    foreign_names = ", ".join(f"`{word}`" for word in foreign)
                    message = f"{subject} is written in another language's types: {foreign_names} → {shape}"
                    yield _finding("note", "type_foreign", node, message, parameter.line)


def _check_cases(tree: SpecTree, cases: CaseFile) -> Iterator[SpecFinding]:
    nodes = {node.id: node for node in tree.walk() if node.id}
    for identifier, component_cases in cases.components.items():
        if identifier not in nodes:
            yield _finding(
                "error", "case_dangling", tree.root, f"there are cases for {identifier}, which is not a node"
            )
            continue
        stated = {text for text, _ in requirements_of(nodes[identifier])}
        for text in sorted(covered_by(component_cases) - stated):
            message = f"a case covers {text!r}, which is not a requirement of {identifier}"
            yield _finding("warning", "covers_nothing", nodes[identifier], message)
        parameter_count = len(parameters_of(nodes[identifier], "inputs"))
        for call in component_cases.calls:
            if parameter_count and not call.raises and len(call.args) + len(call.named) > parameter_count:
                message = (
                    f"the call with {json.dumps(call.args)} has more arguments than {identifier} has inputs"
                )
                yield _finding("warning", "case_arguments", nodes[identifier], message)
    for node in tree.leaves():
        component_cases = cases.components.get(node.id, ComponentCases())
        names = (function_of(node, component_cases), snake_case(node.name))
        stated_cases = [case_from_requirement(text, names) for text, _ in requirements_of(node)]
        if not component_cases.calls and not component_cases.properties and not any(stated_cases):
            yield _finding("warning", "no_cases", node, f"the leaf {node.label} has no executable case")


def list_requirements(tree: SpecTree, cases: CaseFile) -> Iterator[RequirementState]:
    for node in tree.walk():
        component_cases = cases.components.get(node.id, ComponentCases())
        covered = covered_by(component_cases)
        names = (function_of(node, component_cases), snake_case(node.name))
        for text, line in requirements_of(node):
            runs = text in covered or case_from_requirement(text, names) is not None
            yield RequirementState(node=node.id, line=line, text=text, executable=runs)


def to_outline(tree: SpecTree) -> list[dict[str, Any]]:
    """The tree as rows for tables and JSON."""
    rows = []
    waiting = [(0, tree.root)]
    while waiting:
        depth, node = waiting.pop()
        rows.append(
            {
                "id": node.id,
                "name": node.name,
                "depth": depth,
                "line": node.line,
                "leaf": node.is_leaf,
                "inputs": {parameter.name: parameter.type for parameter in parameters_of(node, "inputs")},
                "outputs": {parameter.name: parameter.type for parameter in parameters_of(node, "outputs")},
                "dependencies": [name for name, _ in dependencies_of(node)],
                "requirements": [text for text, _ in requirements_of(node)],
            }
        )
        waiting += [(depth + 1, child) for child in reversed(node.children)]
    return rows
