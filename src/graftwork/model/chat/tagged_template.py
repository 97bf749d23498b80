"""A chat template that writes tools and calls as rows have them, around one that has no form for calls.

In: the source of a template. Out: Jinja source that puts the tools into the system turn and the calls into
tags, and goes on with the template. With it, other servers ask a model as it was trained.
"""

import json

from graftwork.text.tool_calls import ANY_ARGUMENTS, CLOSE, OPEN, TOOLS_BEFORE, TOOLS_BEHIND, TOOLS_MARK

_TEXTS = {
    "$ANY": ANY_ARGUMENTS,
    "$BEFORE": TOOLS_BEFORE,
    "$BEHIND": TOOLS_BEHIND,
    "$MARK": TOOLS_MARK,
    "$OPEN": OPEN,
    "$CLOSE": CLOSE,
}
_PRELUDE = r"""
{%- set graft = namespace(turns=[], tools="", text="") -%}
{%- for tool in tools or [] -%}
{%- set function = tool.function or tool -%}
{%- set graft.text = '{"type": "function", "function": {"name": ' ~ (function.name | tojson) -%}
{%- if function.description is string -%}
{%- set graft.text = graft.text ~ ', "description": ' ~ (function.description | tojson) -%}
{%- endif -%}
{%- set graft.text = graft.text ~ ', "parameters": ' ~ ((function.parameters or $ANY) | tojson) ~ "}}" -%}
{%- set graft.tools = graft.tools ~ ("\n" if graft.tools else "") ~ graft.text -%}
{%- endfor -%}
{%- if graft.tools -%}{%- set graft.tools = $BEFORE ~ graft.tools ~ $BEHIND -%}{%- endif -%}
{%- for message in messages -%}
{%- set graft.text = message.content or "" -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- set given = function.arguments if function.arguments is string else function.arguments | tojson -%}
{%- set graft.text = graft.text ~ ("\n" if graft.text else "") ~ $OPEN -%}
{%- set graft.text = graft.text ~ '{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' ~ given ~ "}" -%}
{%- set graft.text = graft.text ~ $CLOSE -%}
{%- endfor -%}
{%- if loop.first and graft.tools and message.role == "system" and $MARK not in graft.text -%}
{%- set graft.text = graft.text ~ ("\n\n" if graft.text else "") ~ graft.tools -%}
{%- elif loop.first and graft.tools and message.role != "system" -%}
{%- set graft.turns = [{"role": "system", "content": graft.tools}] -%}
{%- endif -%}
{%- set turn = message if graft.text == message.content else {"role": message.role, "content": graft.text} -%}
{%- set graft.turns = graft.turns + [turn] -%}
{%- endfor -%}
{%- set messages = graft.turns -%}
"""


def write_tagged_template(source: str) -> str:
    """The template with the prelude; messages without tools and calls reach it as they are."""
    prelude = _PRELUDE.replace("\n", "")
    for name, value in _TEXTS.items():
        prelude = prelude.replace(name, json.dumps(value))
    return prelude + source
