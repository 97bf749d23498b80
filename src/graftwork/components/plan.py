"""Components: nodes of a tree and their cases, with everything that generation needs, in the order to build.

Input: a tree and its case file (`cases.py`). Output: components, dependencies before what uses them. A node
is a component if it is a leaf or has cases. A cycle, or two components of one name, is a UserError that names
the nodes.
"""

import keyword
from pathlib import Path

from graftwork.components.cases import (
    CaseFile,
    ComponentCases,
    Language,
    PropertyCase,
    cases_path,
    read_cases,
    with_requirements,
)
from graftwork.components.read import read_spec
from graftwork.components.tree import (
    SpecNode,
    SpecTree,
    dependencies_of,
    metadata_of,
    parameters_of,
    requirements_of,
    snake_case,
)
from graftwork.components.types import Shape, python_type, read_type
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserError


class Component(Record):
    """One function with its module, its interface and its cases."""

    id: str
    name: str
    module: str
    function: str
    description: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    """Names and types as the spec writes them."""
    outputs: tuple[tuple[str, str], ...] = ()
    requirements: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    """Ids of components that it may call."""
    after: tuple[str, ...] = ()
    """Ids of components that its properties call: they are built first."""
    cases: ComponentCases = ComponentCases()
    line: int = 1

    @property
    def signature(self) -> str:
        typed = [(name, python_type(kind)) for name, kind in self.parameters]
        parameters = ", ".join(f"{name}: {kind}" if kind else name for name, kind in typed)
        result = self.returns
        return f"def {self.function}({parameters})" + (f" -> {result}:" if result else ":")

    @property
    def returns(self) -> str:
        if len(self.outputs) == 1:
            return python_type(self.outputs[0][1])
        return "dict" if self.outputs else ""


class ComponentPlan(Record):
    """All components of a spec, in the order they are built."""

    package: str
    language: Language = "python"
    components: tuple[Component, ...] = ()
    spec_hash: str = ""

    def get(self, identifier: str) -> Component:
        return next(component for component in self.components if component.id == identifier)

    def waves(self) -> list[list[Component]]:
        """Components whose dependencies are all in earlier waves."""
        depth: dict[str, int] = {}
        for component in self.components:
            earlier = (*component.dependencies, *component.after)
            depth[component.id] = 1 + max((depth[identifier] for identifier in earlier), default=-1)
        by_depth: list[list[Component]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
        for component in self.components:
            by_depth[depth[component.id]].append(component)
        return by_depth

    def inverse_of(self, rule: PropertyCase | None) -> Component | None:
        """The component that a property calls on results."""
        return self.get(rule.inverse) if rule is not None and rule.inverse is not None else None


def load_plan(spec: Path, cases: Path | None = None) -> ComponentPlan:
    """The components of a spec file and of the cases next to it."""
    return make_plan(read_spec(spec), read_cases(cases or cases_path(spec)), where=str(spec))


def make_plan(tree: SpecTree, cases: CaseFile, *, where: str) -> ComponentPlan:
    """Raises UserError, with the node and its line, if no build order exists."""
    _require_ids(tree, cases, where=where)
    nodes = component_nodes(tree, cases)
    uses = dependencies_by_id(tree, cases)
    earlier = dict(uses)
    for node in nodes:
        rules = cases.components.get(node.id, ComponentCases()).properties
        inverses = [rule.inverse for rule in rules if rule.inverse is not None]
        if missing := [identifier for identifier in inverses if identifier not in uses]:
            raise UserError(
                f"a property of {node.id} names the component {missing[0]}, which does not exist",
                fix="specify the id of a component as `inverse`",
                where=f"components.{node.id}.properties",
            )
        earlier[node.id] = (*uses[node.id], *inverses)
    order = sort_by_dependencies(earlier, where=where, lines={node.id: node.line for node in nodes})
    by_id = {node.id: node for node in nodes}
    components = tuple(_to_component(by_id[identifier], uses[identifier], cases) for identifier in order)
    _require_distinct(components, where=where)
    package = cases.package or snake_case(tree.root.name) or "components"
    content = [
        package,
        cases.language,
        [component.model_dump(mode="json", exclude={"line"}) for component in components],
    ]
    return ComponentPlan(
        package=package, language=cases.language, components=components, spec_hash=fingerprint(content)
    )


def component_nodes(tree: SpecTree, cases: CaseFile) -> list[SpecNode]:
    return [node for node in tree.walk() if node.id and (node.is_leaf or node.id in cases.components)]


def resolve_names(tree: SpecTree) -> dict[str, str]:
    """Ids, names and function names of nodes, each with the id it means."""
    by_name: dict[str, str] = {}
    for node in tree.walk():
        for name in (snake_case(node.name), node.name, node.id):
            if name and node.id:
                by_name.setdefault(name, node.id)
    return by_name | {node.id: node.id for node in tree.walk() if node.id}


def _require_ids(tree: SpecTree, cases: CaseFile, *, where: str) -> None:
    """Cases and dependencies refer to nodes by id, so each component needs its own."""
    lines: dict[str, int] = {}
    for node in tree.walk():
        if not node.id and node.is_leaf:
            raise UserError(
                f"the leaf {node.name} has no id" if node.name else "a leaf has no id and no name",
                why="cases and dependencies name components by their ids",
                fix="write an id that no other node has, in quotes",
                where=f"{where}:{node.line}",
            )
        if node.id and node.id in lines:
            raise UserError(
                f"the id {node.id} is used twice: in lines {lines[node.id]} and {node.line}",
                why="cases and dependencies name components by their ids",
                fix="give one of the nodes another id",
                where=f"{where}:{node.line}",
            )
        lines[node.id] = node.line
    if unknown := [identifier for identifier in cases.components if identifier not in lines]:
        raise UserError(
            f"there are cases for {unknown[0]}, which is not a node of the specification",
            fix="correct the id in the cases, in quotes; `graft spec show` lists the nodes",
            where=f"components.{unknown[0]}",
        )


def dependencies_by_id(tree: SpecTree, cases: CaseFile) -> dict[str, tuple[str, ...]]:
    """Return what each component uses, by id: what it names, else the components directly below it."""
    nodes, by_name = component_nodes(tree, cases), resolve_names(tree)
    identifiers = {node.id for node in nodes}
    dependencies: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        # Its own name means something else that is called the same; its own id is a cycle.
        stated = [name for name, _ in dependencies_of(node) if name in by_name]
        needed = [by_name[name] for name in stated if by_name[name] != node.id or name == node.id]
        if not needed:
            needed = [inner for child in node.children for inner in _components_below(child, identifiers)]
        used = dict.fromkeys(identifier for identifier in needed if identifier in identifiers)
        dependencies[node.id] = (*dependencies.get(node.id, ()), *used)
    return dependencies


def _components_below(node: SpecNode, identifiers: set[str]) -> list[str]:
    if node.id in identifiers:
        return [node.id]
    return [inner for child in node.children for inner in _components_below(child, identifiers)]


def sort_by_dependencies(uses: dict[str, tuple[str, ...]], *, where: str, lines: dict[str, int]) -> list[str]:
    """Dependencies first, otherwise in the order of the file; UserError for a cycle."""
    order: list[str] = []
    remaining = dict(uses)
    while remaining:
        ready = [
            identifier
            for identifier, needed in remaining.items()
            if not any(dependency in remaining for dependency in needed)
        ]
        if not ready:
            cycle = find_cycle(remaining)
            raise UserError(
                describe_cycle(cycle),
                why="a component is built after what it uses, and after the `inverse` of its properties",
                fix="remove one of these dependencies",
                where=f"{where}:{lines.get(cycle[0], 1)}",
            )
        order.append(ready[0])
        del remaining[ready[0]]
    return order


def describe_cycle(cycle: list[str]) -> str:
    if len(cycle) == 2:
        return f"the component {cycle[0]} depends on itself"
    return f"the components {' → '.join(cycle)} depend on each other"


def find_cycle(uses: dict[str, tuple[str, ...]]) -> list[str]:
    """A cycle of these, with its first member again at the end; empty if there is none."""
    path: list[str] = []
    done: set[str] = set()
    for start in uses:
        waiting = [iter([start])]
        path = []
        while waiting:
            dependency = next(waiting[-1], None)
            if dependency is None:
                waiting.pop()
                if path:
                    done.add(path.pop())
            elif dependency in path:
                return [*path[path.index(dependency) :], dependency]
            elif dependency in uses and dependency not in done:
                path.append(dependency)
                waiting.append(iter(uses[dependency]))
    return []


def _to_component(node: SpecNode, dependencies: tuple[str, ...], cases: CaseFile) -> Component:
    component_cases = cases.components.get(node.id, ComponentCases())
    requirements = [text for text, _ in requirements_of(node)]
    function = function_of(node, component_cases)
    return Component(
        id=node.id,
        name=node.name,
        module=function,
        function=function,
        description=describe(node),
        parameters=tuple(
            (to_identifier(parameter.name), parameter.type) for parameter in parameters_of(node, "inputs")
        ),
        outputs=tuple((parameter.name, parameter.type) for parameter in parameters_of(node, "outputs")),
        requirements=tuple(requirements),
        dependencies=dependencies,
        after=tuple(rule.inverse for rule in component_cases.properties if rule.inverse is not None),
        cases=with_requirements(component_cases, requirements, {function, snake_case(node.name)}),
        line=node.line,
    )


def function_of(node: SpecNode, cases: ComponentCases) -> str:
    return cases.function or snake_case(node.name) or snake_case(f"component {node.id}")


def to_identifier(name: str) -> str:
    """A parameter's name as Python can write it: `file path` is file_path, `class` is class_."""
    plain = name if name.isidentifier() else snake_case(name) or "value"
    return f"{plain}_" if keyword.iskeyword(plain) else plain


def describe(node: SpecNode) -> str:
    """The purpose of the node, in the words of the spec."""
    metadata = metadata_of(node)
    listed = metadata.get("responsibilities")
    parts = [metadata.get("description"), *(listed if isinstance(listed, list) else [])]
    text = ". ".join(str(part).replace("_", " ").strip().rstrip(".") for part in parts if part)
    return text or node.body.strip()


def result_shape(component: Component) -> Shape | None:
    """The shape of a result: one output is the value itself, several are a dictionary."""
    if len(component.outputs) == 1:
        return read_type(component.outputs[0][1])[0]
    return Shape("dict") if component.outputs else None


def _require_distinct(components: tuple[Component, ...], *, where: str) -> None:
    by_module: dict[str, Component] = {}
    for component in components:
        if keyword.iskeyword(component.function):
            raise UserError(
                f"the component {component.id} is called {component.function}, which is a word of Python",
                why="its function and its module have this name",
                fix=f"give it another name, or `function` under components.{component.id} in the cases",
                where=f"{where}:{component.line}",
            )
        namesake = by_module.setdefault(component.module, component)
        if namesake is not component:
            raise UserError(
                f"the components {namesake.id} and {component.id} are both called {component.module}",
                why="each becomes a module of the package",
                fix="give one of them another name, or `function` in the cases",
                where=f"{where}:{component.line}",
            )
