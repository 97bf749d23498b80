"""Specifications: the dialects they are written in, what is found in them, and what becomes of them."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.components.cases import (
    CallCase,
    CaseFile,
    ComponentCases,
    PropertyCase,
    case_from_requirement,
    hidden_ids,
    read_cases,
)
from graftwork.components.check import check_file, check_tree, find_duplicates, list_requirements
from graftwork.components.plan import load_plan, make_plan
from graftwork.components.read import is_outline, parse_any, parse_spec, write_spec
from graftwork.components.tree import (
    SpecNode,
    SpecTree,
    dependencies_of,
    diff_trees,
    parameters_of,
    requirements_of,
    same_tree,
)
from graftwork.components.types import Shape, fits, read_type
from graftwork.records.errors import GraftError, UserError

CONVERTER = Path(__file__).parents[3] / "examples" / "converter" / "converter.tiki"
FAULTY = """\
id: root
name: Root
children:
  - id: "1"
    name: One
    metadata:
      inputs: [a: "pid", b: "String.t()"]
      dependencies: ["2", "9.9"]
  - id: "2"
    name: Two
    metadata: {dependencies: ["1"]}
    testing:
      test_requirements: ["two(1, 2) == 3", "add(1, 2) == 3", "must_be_fast"]
  - id: "2"
    name: Twice
  - name: Nameless
stages:
  stage_4: {components: ["1", "monitoring"]}
"""


def found(text=FAULTY, cases=None):
    tree = parse_spec(text, where="spec")
    return {(each.code, each.line) for each in check_tree(tree, cases or CaseFile())}


def test_findings_name_their_lines():
    codes = found()
    for code, line in (
        ("id_twice", 9),
        ("id_twice", 14),
        ("id_missing", 16),
        ("dangling", 8),
        ("dangling", 18),
        ("type_unknown", 7),
        ("type_foreign", 7),
        ("cycle", 8),
        ("no_cases", 4),
    ):
        assert (code, line) in codes


def test_requirements_that_state_a_call_are_executable_and_slogans_are_listed():
    tree = parse_spec(FAULTY, where="spec")
    states = {each.text: each.executable for each in list_requirements(tree, CaseFile())}
    assert states == {"two(1, 2) == 3": True, "add(1, 2) == 3": False, "must_be_fast": False}


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ('split("a,b") -> ["a", "b"]', CallCase(args=("a,b",), gives=["a", "b"])),
        ("f() raises ValueError", CallCase(raises="ValueError")),
        ("must be idempotent", PropertyCase(name="idempotent", idempotent=True)),
        ("must_not_crash", PropertyCase(name="never_raises", raises_only=())),
        ("f(x) == 3", None),
        ("len([1]) == 1", None),
        ("reads real files", None),
    ],
)
def test_a_requirement_becomes_a_case_where_it_states_one(text, case):
    made = case_from_requirement(text, ("f", "split"))
    expected = case.model_copy(update={"covers": (text,)}) if case is not None else None
    assert made == expected


def test_a_cycle_is_refused_with_the_ids_of_its_nodes():
    text = FAULTY.replace('  - id: "2"\n    name: Twice\n  - name: Nameless\n', "")
    with pytest.raises(UserError, match="1 → 2 → 1"):
        make_plan(parse_spec(text, where="spec"), CaseFile(), where="spec")


@pytest.mark.parametrize(
    ("leaves", "message", "line"),
    [
        ('  - {id: "1", name: A}\n  - {id: "1", name: B}\n', "the id 1 is used twice", 5),
        ("  - {name: A}\n", "has no id", 4),
        ('  - {id: "1", name: A, dependencies: ["1"]}\n', "1 depends on itself", 4),
        ('  - {id: "1", name: class}\n', "1 is called class, which is a word of Python", 4),
        ('  - {id: "1", name: A B}\n  - {id: "2", name: a-b}\n', "1 and 2 are both called a_b", 5),
    ],
)
def test_a_tree_that_cannot_be_built_is_refused_with_node_and_line_and_check_finds_it(leaves, message, line):
    tree = parse_spec(f"id: r\nname: R\nchildren:\n{leaves}", where="spec")
    with pytest.raises(UserError, match=message) as refused:
        make_plan(tree, CaseFile(), where="spec")
    assert refused.value.where == f"spec:{line}"
    assert any(each.level == "error" for each in check_tree(tree, CaseFile()))


def test_a_component_that_uses_what_is_called_like_itself_is_no_cycle():
    tree = parse_spec("id: r\nname: R\nchildren:\n  - {id: a, name: Pandoc, deps: [pandoc]}\n", where="spec")
    assert make_plan(tree, CaseFile(), where="spec").get("a").dependencies == ()
    assert "cycle" not in {each.code for each in check_tree(tree, CaseFile())}


def test_a_cycle_through_the_children_of_a_component_is_found():
    text = 'id: r\nname: R\nchildren:\n  - {id: "1", name: A, dependencies: [r]}\n'
    cases = CaseFile(components={"r": ComponentCases(calls=(CallCase(gives=1),))})
    assert ("cycle", 1) in found(text, cases)


def test_cases_of_a_node_that_does_not_exist_stop_the_plan():
    tree = parse_spec('id: r\nname: R\nchildren:\n  - {id: "1.10", name: A}\n', where="spec")
    cases = CaseFile(components={"1.1": ComponentCases(calls=(CallCase(gives=1),))})
    with pytest.raises(UserError, match=r"cases for 1\.1, which is not a node"):
        make_plan(tree, cases, where="spec")


STRANGE = """\
id: s
name: S
children:
  - id: s1
    name: total
    inputs:
      - {name: lines, type: list(map), description: the lines}
      - {name: file path, type: string}
      - rate: {type: float, default: 0.2}
    outputs: decimal
    deps: s2
    requirements:
      - {id: R1, text: "total([], '', 0.2) == 0"}
      - [not, a, text]
  - id: s2
    name: round
    outputs: {}
    depends_on: {s1: optional}
    acceptance_criteria: [round(1) == 1]
"""


def test_parameters_dependencies_and_requirements_are_read_in_the_forms_that_people_write():
    tree = parse_spec(STRANGE, where="spec")
    total, rounded = tree.root.children
    assert [(each.name, each.type) for each in parameters_of(total, "inputs")] == [
        ("lines", "list(map)"),
        ("file path", "string"),
        ("rate", "float"),
    ]
    assert [(each.name, each.type) for each in parameters_of(total, "outputs")] == [("result", "decimal")]
    assert [name for name, _ in dependencies_of(total)] == ["s2"]
    assert dependencies_of(rounded) == [("s1", 18)]
    assert [text for text, _ in requirements_of(total)] == ["total([], '', 0.2) == 0"]
    assert [text for text, _ in requirements_of(rounded)] == ["round(1) == 1"]
    assert {("field_unread", 13), ("parameter_renamed", 8), ("cycle", 11)} <= found(STRANGE)


@pytest.mark.parametrize("children", ["{a: {name: A}}", "[{id: a, name: A}, text]", "3"])
def test_children_that_are_no_list_of_nodes_are_an_error(children):
    text = f"id: r\nname: R\nchildren: {children}\n"
    assert ("field_unread", 3) in found(text)
    tree = parse_spec(text, where="spec")
    assert any(each.level == "error" for each in check_tree(tree, CaseFile()))


def test_every_finding_of_a_file_has_a_fix(tmp_path):
    (tmp_path / "b.tiki").write_text("T\n*2 A [cross_reference: *9]\n*5**1 B\n")
    (tmp_path / "a.tiki").write_text(FAULTY)
    reports = [check_file(tmp_path / name) for name in ("a.tiki", "b.tiki")]
    assert all(each.fix for report in reports for each in report.findings)


def test_a_property_that_is_no_expression_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.cases.yaml"
    path.write_text('components:\n  "1":\n    properties:\n      - {name: a, holds: "result =="}\n')
    with pytest.raises(UserError, match="not a Python expression") as refused:
        read_cases(path)
    assert refused.value.where == f"{path}:4"


def test_files_with_the_same_bytes_are_found(tmp_path):
    for name in ("a.tiki", "b.tiki"):
        (tmp_path / name).write_text("id: a\nname: A\n")
    [finding] = find_duplicates([tmp_path / "a.tiki", tmp_path / "b.tiki"])
    assert finding.file.endswith("b.tiki")


def test_every_second_call_of_a_stage_is_hidden_unless_marked():
    calls = tuple(CallCase(args=(n,), gives=n) for n in range(4))
    assert hidden_ids(ComponentCases(calls=calls)) == {calls[1].id, calls[3].id}
    marked = (calls[0].model_copy(update={"hidden": True}),)
    assert hidden_ids(ComponentCases(calls=marked)) == {calls[0].id}


def test_calls_that_contradict_each_other_are_refused_with_their_line(tmp_path):
    path = tmp_path / "x.cases.yaml"
    path.write_text(
        'components:\n  "1":\n    calls:\n      - {args: [1], gives: 1}\n      - {args: [1], gives: 2}\n'
    )
    with pytest.raises(UserError, match="different values") as refused:
        read_cases(path)
    assert refused.value.where == f"{path}:4"


@pytest.mark.parametrize(
    ("text", "shape", "foreign"),
    [
        ("list(string)", "list[str]", True),
        ("string | nil", "str | None", True),
        (":pdf | :rtf", "Literal['pdf', 'rtf']", True),
        ("list[int]", "list[int]", False),
        ("'a|b' | 'c'", "Literal['a|b', 'c']", False),
        ("integer?", "int | None", True),
        ("{:ok, term}", "list", True),
        ("Optional[str]", "str | None", False),
    ],
)
def test_types_of_other_languages_are_translated(text, shape, foreign):
    read, words = read_type(text)
    assert (str(read), bool(words)) == (shape, foreign)


@pytest.mark.parametrize("text", ["pid", "GenServer.on_start()", "???", ""])
def test_a_type_that_no_python_type_is_known_for_has_no_shape(text):
    assert read_type(text)[0] is None


def test_a_truth_value_is_no_number():
    assert fits(True, Shape("bool"))
    assert not fits(True, Shape("int"))
    assert not fits([1, "a"], Shape("list", (Shape("int"),)))


def test_the_example_has_no_error_and_every_requirement_has_a_case():
    report = check_file(CONVERTER)
    assert report.errors == 0
    assert all(each.executable for each in report.requirements)
    assert report.leaves >= 20


def test_components_come_after_what_they_use():
    plan = load_plan(CONVERTER)
    built = set()
    for wave in plan.waves():
        for component in wave:
            assert {*component.dependencies, *component.after} <= built
        built |= {component.id for component in wave}
    assert built == {component.id for component in plan.components}


def test_a_diff_names_added_removed_moved_and_changed_nodes():
    old = parse_spec("id: a\nname: A\nchildren:\n - {id: b, name: B, x: 1}\n - {id: c, name: C}\n", where="o")
    new = parse_spec(
        "id: a\nname: A\nchildren:\n - {id: b, name: B, x: 2, children: [{id: d, name: D}]}\n", where="n"
    )
    changes = {(change.kind, change.node, change.key) for change in diff_trees(old, new)}
    assert changes == {("removed", "c", ""), ("added", "d", ""), ("changed", "b", "x")}
    assert diff_trees(old, old) == []


def test_operations_of_an_openapi_document_become_leaves():
    tree = parse_any(
        """\
openapi: 3.1.0
info: {title: Shop, version: "2"}
paths:
  /orders/{id}:
    get:
      operationId: getOrder
      parameters: [{name: id, in: path, schema: {type: integer}}]
      responses: {"200": {content: {application/json: {schema: {$ref: "#/components/schemas/Order"}}}}}
components: {schemas: {Order: {type: object}}}
""",
        where="shop.yaml",
    )
    [leaf] = tree.leaves()
    assert (leaf.id, leaf.name) == ("1.1", "getOrder")
    assert leaf.fields["metadata"]["inputs"] == {"id": "integer"}
    assert leaf.fields["metadata"]["outputs"] == {"result": "map"}


def test_definitions_of_a_json_schema_become_leaves():
    tree = parse_any('{"$defs": {"Age": {"type": "integer", "minimum": 0}}}', where="ages.json")
    [leaf] = tree.leaves()
    assert leaf.name == "validate Age"
    assert leaf.fields["schema"] == {"type": "integer", "minimum": 0}


def test_examples_of_a_json_schema_are_requirements_that_can_be_run():
    tree = parse_any('{"$defs": {"Age": {"type": "integer", "examples": [7]}}}', where="ages.json")
    assert [each.executable for each in list_requirements(tree, CaseFile())] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "openapi: 3.1.0\npaths: {}\n",
        '{"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {}}',
    ],
)
def test_a_schema_that_is_given_as_a_specification_is_refused_with_the_command_that_converts_it(text):
    with pytest.raises(UserError, match="OpenAPI") as refused:
        parse_spec(text, where="api.yaml")
    assert "graft spec convert" in refused.value.fix


YAML = """\
id: root
name: Deploy
metadata: {deps: [a, b], inputs: [bundle: binary, stage: integer]}
children:
  - id: 1.10
    name: Pipeline
    enabled: yes
    created: 2025-01-27
    rollout: [5, 0.5, 1.50]
    children:
      - {id: "1.10.1", name: Check}
  - name: without an id
"""
OUTLINE = """\
Test application

Written by hand. * is a star in prose.
version: 1.2

*1 Core system [priority: high, mastery: 85%]
Handles it.

```python
*1 no heading in code
```

*1**1 Data [kind: store]
*1**1***1 Cache [cross_reference: *2]
* a bullet
*2 Last
no line break at the end"""

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
lines = st.text(st.sampled_from("ab*12 `~[]:#-|\n\t\"'éü\r\u2028"), max_size=24)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts | lines,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | lines, inner, max_size=3),
    max_leaves=4,
)
RESERVED = {"id", "name", "body", "tail", "children", "exact"}
fields = st.dictionaries(lines | texts, plain, max_size=3).map(
    lambda found: {key: value for key, value in found.items() if key not in RESERVED and key != "<<"}
)


def nodes(depth: int = 2):
    children = st.lists(st.deferred(lambda: nodes(depth - 1)), max_size=2) if depth else st.just([])
    return st.builds(
        lambda **made: SpecNode(**{**made, "children": tuple(made["children"])}),
        id=st.sampled_from(["1", "1.1", "2", "1.10", "x", ""]) | lines,
        name=lines | texts,
        tail=st.sampled_from(["", " [a: b]", "  "]) | lines,
        body=lines.map(lambda text: text and text + "\n") | lines,
        fields=fields,
        children=children,
    )


def test_a_yaml_tree_is_written_back_without_loss_in_both_dialects():
    tree = parse_spec(YAML, where="spec")
    for dialect in ("yaml", "outline"):
        again = parse_spec(write_spec(tree, dialect), where="written")
        assert again.dialect == dialect
        assert same_tree(tree, again)


def test_an_outline_is_written_back_byte_for_byte():
    tree = parse_spec(OUTLINE, where="spec")
    assert write_spec(tree, "outline") == OUTLINE
    assert same_tree(tree, parse_spec(write_spec(tree, "yaml"), where="written"))


def test_an_outline_is_read_by_its_numbered_headings_alone():
    tree = parse_spec(OUTLINE, where="spec")
    assert [node.id for node in tree.walk()] == ["root", "1", "1.1", "1.1.1", "2"]
    assert tree.root.name == "Test application"
    core = tree.root.children[0]
    assert (core.name, core.tail) == ("Core system", " [priority: high, mastery: 85%]")
    assert "*1 no heading in code" in core.body


def test_headings_without_numbers_are_numbered_in_order():
    tree = parse_spec("Title\n* One\n** Two\n** Three\n* Four\n", where="spec")
    assert [node.id for node in tree.walk()] == ["root", "1", "1.1", "1.2", "2"]
    assert tree.findings[0].code == "numbered"


def test_ids_that_yaml_reads_as_numbers_keep_their_text_and_are_named_by_line():
    tree = parse_spec(YAML, where="spec")
    assert tree.root.children[0].id == "1.10"
    [finding] = [found for found in tree.findings if found.code == "id_not_quoted"]
    assert (finding.line, finding.node) == (5, "1.10")


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("1", "a number"),
        ("1.10", "1.10 is the number 1.1"),
        ("yes", "true or false"),
        ("2024-01-01", "a date"),
    ],
)
def test_an_id_that_is_not_quoted_is_named_with_what_yaml_reads(written, kind):
    tree = parse_spec(f"id: {written}\nname: A\n", where="spec")
    assert tree.root.id == written
    assert kind in tree.findings[0].message


@pytest.mark.parametrize("name", ["no", "1.10", "2024-01-01", "3", ".5", "1e3"])
def test_a_name_that_is_not_quoted_is_a_name_and_survives_the_round_trip(name):
    tree = parse_spec(f"id: r\nname: {name}\nchildren:\n  - {{id: a, name: {name}}}\n", where="spec")
    assert tree.root.name == tree.root.children[0].name == name
    for dialect in ("yaml", "outline"):
        assert same_tree(tree, parse_spec(write_spec(tree, dialect), where="written"))


def test_keys_that_a_merge_brings_may_be_given_again():
    text = "id: r\nname: R\nchildren:\n  - &leaf {id: a, name: A}\n  - <<: *leaf\n    id: b\n"
    tree = parse_spec(text, where="spec")
    assert [(node.id, node.name) for node in tree.root.children] == [("a", "A"), ("b", "A")]
    assert tree.findings == ()
    twice = parse_spec("id: r\nname: R\nname: S\n", where="spec")
    assert [each.code for each in twice.findings] == ["key_twice"]


def test_scalars_that_yaml_would_change_stay_text():
    fields = parse_spec(YAML, where="spec").root.children[0].fields
    assert fields["enabled"] == "yes"
    assert fields["created"] == "2025-01-27"
    assert fields["rollout"] == [5, 0.5, "1.50"]


def test_inputs_as_a_list_of_pairs_have_names_types_and_lines():
    root = parse_spec(YAML, where="spec").root
    found = [(each.name, each.type, each.line) for each in parameters_of(root, "inputs")]
    assert found == [("bundle", "binary", 3), ("stage", "integer", 3)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("# Plan\n\nWe will *do* it.\n\n* one\n* two\n", "Markdown heading"),
        ("@ goals\n  objective: x\n", "free text"),
        ("== Title ==\nID: 1\nPRINCIPLE {\n A: b\n}\n", "free text"),
        ("", "empty"),
        ("just words", "free text"),
        ("- a\n- b\n", "YAML without a tree"),
        ("openness: 3\n", "YAML without a tree"),
    ],
)
def test_free_text_is_refused_with_the_reason(text, reason):
    with pytest.raises(UserError) as refused:
        parse_spec(text, where="notes.tiki")
    assert reason in refused.value.what
    assert "numbered headings" in refused.value.why
    assert refused.value.where.startswith("notes.tiki")


def test_broken_yaml_that_is_meant_as_a_tree_is_named_by_its_line():
    with pytest.raises(UserError, match="not valid YAML") as refused:
        parse_spec('id: root\nname: "A\nchildren: []\n  x: 1\n', where="a.tiki")
    assert refused.value.where.startswith("a.tiki:")


def test_a_tree_of_one_node_has_no_outline_form():
    with pytest.raises(UserError, match="one node"):
        write_spec(parse_spec("id: a\nname: A\n", where="a"), "outline")


@settings(max_examples=100, deadline=None)
@given(nodes())
def test_every_tree_is_written_to_yaml_and_read_back_the_same(node):
    tree = parse_yaml_form(node)
    assert same_tree(tree, parse_spec(write_spec(tree, "yaml"), where="written"))


@settings(max_examples=100, deadline=None)
@given(st.lists(nodes(1), min_size=1, max_size=3), nodes(0))
def test_every_tree_is_written_to_an_outline_and_read_back_the_same(children, root):
    tree = parse_yaml_form(root.model_copy(update={"children": tuple(children)}))
    written = write_spec(tree, "outline")
    assert is_outline(written)
    assert same_tree(tree, parse_spec(written, where="written"))


def parse_yaml_form(node: SpecNode) -> SpecTree:
    """A tree as a file would hold it: written to YAML once, so that values are those that YAML has."""
    return parse_spec(write_spec(SpecTree(dialect="yaml", root=with_name(node)), "yaml"), where="made")


def with_name(node: SpecNode) -> SpecNode:
    return node.model_copy(update={"name": node.name or "n"})


@settings(max_examples=300, deadline=None)
@given(lines | texts)
def test_any_text_is_read_or_refused_and_never_crashes(text):
    try:
        tree = parse_spec(text, where="any")
    except GraftError:
        return
    assert same_tree(tree, parse_spec(write_spec(tree, "yaml"), where="again"))
