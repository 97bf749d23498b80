"""A base model made to stop this machine: sizes without bounds, chat templates that run on."""

import json

import pytest

from graftwork.model.chat.renderer import ChatRenderer, TemplateRunsOn
from graftwork.model.shape import read_config_shape
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
QUESTION = (Message(role="user", content="How far is it?"),)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 1.5),
        ("num_hidden_layers", True),
        ("num_hidden_layers", "12"),
        ("num_attention_heads", 0),
        ("hidden_size", 10**30),
        ("vocab_size", float("inf")),
        ("intermediate_size", [1, 2]),
        ("num_experts", 10**9),
    ],
)
def test_a_size_without_bounds_is_refused_by_its_name(tmp_path, name, size):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, name: size}))
    with pytest.raises(UserError, match=f"config.json states {name}"):
        read_config_shape(file)
    file.write_text(json.dumps(CONFIG))
    assert read_config_shape(file).layers == 2


def test_a_config_of_deep_brackets_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="is not JSON"):
        read_config_shape(tmp_path / "config.json")


def render(source: str) -> list[str]:
    return ChatRenderer(source, control_tokens=["<|e|>"], names={}, seconds=0.2).ask(QUESTION)


def grow(step: str, first: str = "'xx'") -> str:
    return "{% set n = namespace(t=" + first + ") %}{% for a in range(60) %}" + step + "{% endfor %}"


LONG = "range(99999)"
RUN_ON = {
    "nested loops": f"{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{% endfor %}}{{% endfor %}}",
    "a filtered loop": f"{{% for a in {LONG} %}}{{% for b in {LONG} if false %}}{{% endfor %}}{{% endfor %}}",
    "a recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 9 }}"
    "{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "an endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "repeated text": "{{ 'x' * 10 ** 10 }}",
    "repeated lists": "{{ ([1] * 10 ** 10) | length }}",
    "a doubled text": grow("{% set n.t = n.t ~ n.t %}"),
    "an added text": grow("{% set n.t = n.t + n.t %}"),
    "a doubled block": grow("{% set b %}{{ n.t }}{{ n.t }}{% endset %}{% set n.t = b %}"),
    "a replaced text": grow("{% set n.t = n.t | replace('x', n.t) %}"),
    "a method that replaces": grow("{% set n.t = n.t.replace('x', n.t) %}"),
    "a wide text": "{{ 'x' | center(10000000000) }}",
    "a wide method": "{{ 'x'.ljust(10000000000) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format method": "{{ '{:10000000000}'.format(1) }}",
    "a wide format by an argument": "{{ '{:{w}}'.format(1, w='10000000000') }}",
    "a wide format of a mapping": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "a wide format filter": "{{ '%10000000000d' | format(1) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a squared number": grow("{% set n.t = n.t * n.t %}", first="9"),
}


@pytest.mark.parametrize("kind", RUN_ON)
def test_a_template_that_runs_on_is_ended(kind):
    with pytest.raises(TemplateRunsOn, match="does not finish"):
        render(RUN_ON[kind])


@pytest.mark.parametrize(
    "source", ["{% for", "{{ lipsum(n=9) }}", "{{ range(10 ** 6) }}", "{{ " + "(" * 5000]
)
def test_a_template_that_cannot_be_rendered_is_an_expected_error(source):
    with pytest.raises(UserError):
        render(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ 'b' }}", "a1b"),
        ("{{ '%02d' % 7 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}{{ [1] + [2] }}", "078abab[1, 2]"),
        ("{{ '{:>3}{{:{}}}'.format(1, 2) }}", "  1{:2}"),
        ("{% for x in 'abc' %}{{ loop.index }}{{ x }}{{ '.' if loop.last }}{% endfor %}", "1a2b3c."),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.length }}{{ x }} {% endfor %}", "21 23 "),
        ("{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% macro f(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}", "1z"),
        (
            "{{ {'a': 1} | tojson }}{{ 'x' | indent(2) }}{{ ['a', 'b'] | map('upper') | join(', ') }}",
            '{"a": 1}xA, B',
        ),
    ],
)
def test_what_templates_usually_do_stays_as_it_is(source, text):
    assert "".join(render(source)) == text
