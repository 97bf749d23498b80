"""Both dialects are read into one tree and written back without loss; free text is refused with a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.components.read import is_outline, parse_spec, write_spec
from graftwork.components.tree import SpecNode, SpecTree, parameters_of, same_tree
from graftwork.records.errors import GraftError, UserError

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
