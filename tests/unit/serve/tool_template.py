"""A chat template with a form for tool calls, and two tools."""

TOOL_TEMPLATE = (
    "{%- set led = messages[0].role == 'system' %}"
    "{%- if tools %}<|im_start|>system\n{% if led %}{{ messages[0].content }}\n{% endif %}"
    "TOOLS{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{%- elif led %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "Where is it?"}]
PLACE = {"enum": ["Bern", "Rome"]}
FIND = {
    "type": "object",
    "properties": {"place": PLACE},
    "required": ["place"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": FIND}},
    {"type": "function", "function": {"name": "wait", "parameters": NOTHING}},
]
