"""Bad input to every endpoint: an error that names the field, no crash, and nothing of other requests."""

import asyncio
import json

import pytest
from openai import APIStatusError
from serve_engines import embedded, llamacpp, serve_with
from serve_harness import DEADLINE, ListSink, open_house, raw
from tool_template import ASK, TOOLS

from graftwork.http.client import Client
from graftwork.serve.gateway import APIS

SECRET = "the-secret-of-somebody-else"
JSON = (("content-type", "application/json"),)
GOOD = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "once"},
    "/v1/responses": {"input": "once"},
    "/v1/messages": {"messages": ASK, "max_tokens": 4},
    "/v1/embeddings": {"input": "once"},
}
NUMBERS = (
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "seed",
    "max_output_tokens",
    "top_logprobs",
    "dimensions",
)
WRONG = {
    **{name: value for name in NUMBERS for value in ("many",)},
    "model": 7, "messages": "hello", "prompt": {"a": 1}, "input": 3.5, "stream": "yes", "stop": 5,
    "stop_sequences": [1], "tools": {"name": "find"}, "tool_choice": 3, "response_format": "json",
    "text": "json", "logprobs": "all", "metadata": [], "user": 1, "system": 5, "instructions": 5,
    "encoding_format": "binary", "stream_options": "all", "parallel_tool_calls": "no",
}  # fmt: skip
NOT_JSON = {
    "empty": b"",
    "cut off": b'{"messages": [{"role": "us',
    "two values": b"{} {}",
    "a list": b"[]",
    "a number": b"17",
    "not a number": b'{"temperature": NaN}',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe\xc3"}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a NUL in the text": b'{"messages"\x00: []}',
    "deeply nested": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "UTF-16": '{"messages": []}'.encode("utf-16"),
}


def go(main):
    return asyncio.run(asyncio.wait_for(main(), 300))


async def post(house, path, body: bytes):
    client = Client(port=house.port, keep=0)
    reply = await client.send("POST", path, body=body, headers=JSON)
    return reply.status, json.loads(await reply.read())


def check_error(path, status, answer):
    """An error in the form of its API, with a message; the field if there is one."""
    assert 400 <= status < 500, answer
    assert isinstance(answer["error"]["message"], str)
    assert answer["error"]["message"]
    if path != "/v1/messages":
        assert {"message", "type", "param", "code"} <= answer["error"].keys()
    assert SECRET not in json.dumps(answer)
    return answer["error"]


async def still_answers(house):
    status, answer = await post(
        house, "/v1/chat/completions", b'{"messages": [{"role":"user","content":"hi"}]}'
    )
    assert status == 200
    assert answer["choices"][0]["message"]["content"].endswith("hi")


@pytest.mark.parametrize("path", APIS)
def test_a_body_that_is_no_json_object_is_refused_by_every_endpoint(path):
    async def main():
        async with open_house() as house:
            await post(house, "/v1/chat/completions", json.dumps({"messages": [
                {"role": "user", "content": SECRET}]}).encode())  # fmt: skip
            for name, body in NOT_JSON.items():
                status, answer = await post(house, path, body)
                assert status == 400, name
                check_error(path, status, answer)
            await still_answers(house)

    go(main)


@pytest.mark.parametrize("path", APIS)
def test_wrong_types_and_unknown_fields_are_refused_with_the_name_of_the_field(path):
    async def main():
        async with open_house() as house:
            wrong = {**WRONG, "bananas": 1, "x" * 3000: 1, "": 1}
            for field, value in wrong.items():
                status, answer = await post(house, path, json.dumps({**GOOD[path], field: value}).encode())
                error = check_error(path, status, answer)
                shown = error.get("param") or error["message"]
                # A field of one API is translated into those of another.
                same = {"max_output_tokens": "max_tokens", "stop_sequences": "stop", "text": "text"}
                assert field[:80] in shown or same.get(field, "?") in shown, (field, answer)
                assert len(json.dumps(answer)) < 8000
            for value in (None, 1, "x", [], {}):
                body = {**GOOD[path], **dict.fromkeys(("messages", "prompt", "input"), value)}
                kept = {key: body[key] for key in GOOD[path]}
                if path in ("/v1/completions", "/v1/responses", "/v1/embeddings") and value == "x":
                    continue
                status, answer = await post(house, path, json.dumps(kept).encode())
                check_error(path, status, answer)
            await still_answers(house)

    go(main)


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "stop"), ("/v1/completions", "stop"), ("/v1/messages", "stop_sequences")],
)
def test_a_stop_string_of_megabytes_is_refused(path, field):
    # The end of the answer is compared with its beginnings at every token: it would freeze the engine.
    async def main():
        async with open_house() as house:
            for value in (["x" * (1 << 20)], ["fine", "x" * 513]):
                status, answer = await post(house, path, json.dumps({**GOOD[path], field: value}).encode())
                assert field in check_error(path, status, answer)["message"]
            status, _ = await post(house, path, json.dumps({**GOOD[path], field: ["x" * 512]}).encode())
            assert status == 200

    go(main)


def test_tools_and_schemas_that_are_too_large_or_too_deep_are_refused_with_their_field():
    deep: dict = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    large = {"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(5000)}}

    async def main():
        async with open_house() as house:
            for schema in (deep, large):
                function = {"name": "f", "parameters": schema}
                tools = {"messages": ASK, "tools": [{"type": "function", "function": function}]}
                asked = {"name": "s", "schema": schema}
                formats = {
                    "messages": ASK,
                    "response_format": {"type": "json_schema", "json_schema": asked},
                }
                for field, body in (("tools", tools), ("response_format", formats)):
                    status, answer = await post(house, "/v1/chat/completions", json.dumps(body).encode())
                    assert check_error("", status, answer)["param"].startswith(field)
                claude = {"messages": ASK, "max_tokens": 4, "tools": [{"name": "f", "input_schema": schema}]}
                status, answer = await post(house, "/v1/messages", json.dumps(claude).encode())
                check_error("/v1/messages", status, answer)
            many = {"messages": ASK, "tools": [TOOLS[0]] * 129}
            status, answer = await post(house, "/v1/chat/completions", json.dumps(many).encode())
            assert check_error("", status, answer)["param"] == "tools"
            status, answer = await post(house, "/v1/chat/completions", b" " * (5 << 20))
            assert status == 413
            await still_answers(house)

    go(main)


@pytest.mark.parametrize("path", APIS)
def test_a_chunked_body_that_is_cut_off_is_no_request(path):
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    body = json.dumps(GOOD[path]).encode()
    cut = {
        "within a chunk": b"%x\r\n" % (len(body) + 5) + body,
        "before the last chunk": b"%x\r\n%b\r\n" % (len(body), body),
        "within a length": b"%x" % len(body),
        "no length": b"zz\r\n" + body,
        "a negative length": b"-5\r\n" + body,
        "an endless length": b"f" * 40 + b"\r\n" + body,
    }

    async def main():
        sink = ListSink()
        async with open_house(sink) as house:
            for name, data in cut.items():
                reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
                writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + data)
                writer.write_eof()
                answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
                writer.close()
                assert b" 200 " not in answer.split(b"\r\n")[0], name
            short = await raw(house.port, head + b"content-length: 5\r\nconnection: close\r\n\r\n" + b"{}   ")
            assert short.startswith(b"HTTP/1.1 400")
            await still_answers(house)
            await house.close_captures()
            assert len(sink.captures) == 1
            assert len(house.stub.asked) == 1

    go(main)


NASTY = {
    "counted twice": "^(a?){400}a{400}$",
    "exponential automaton": "^.*a.{60}$",
    "nested stars": "^((a*)*)*b$",
    "product of counts": "^(a{0,900}){0,900}$",
    "a long alternative": "^(" + "|".join("a" * i + "b" for i in range(200)) + ")$",
    "unicode classes": r"^(\p{L}\p{N}|\w\s){1,300}$",
    "look-around": "^(?=a)(?!b)a$",
    "back-reference": r"^(a)\1$",
    "not a regular expression": "^((($",
}
SCHEMAS = {
    **{name: {"type": "string", "pattern": pattern} for name, pattern in NASTY.items()},
    "a rare multiple": {"type": "integer", "multipleOf": 999999937},
    "many items": {"type": "array", "items": {"type": "null"}, "minItems": 10**6},
    "a product of choices": {
        "allOf": [
            {"anyOf": [{"properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(8)]}
            for i in range(12)
        ]
    },
    "references that double": {
        "$defs": {
            **{
                f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
                for i in range(40)
            },
            "d40": {"type": "null"},
        },
        "$ref": "#/$defs/d0",
    },
    "a reference to itself": {"$ref": "#"},
    "many fields": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}},
}


@pytest.mark.parametrize("engine", [embedded, llamacpp])
def test_adversarial_schemas_are_refused_or_answered_while_others_go_on(
    engine, tiny_base, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "gguf"))

    async def main():
        async with serve_with(engine, tiny_base) as (house, client):
            await client.chat.completions.create(model="base", messages=ASK, max_tokens=1)
            for name, schema in SCHEMAS.items():
                wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
                nasty = asyncio.create_task(
                    client.with_options(timeout=300).chat.completions.create(
                        model="base", messages=ASK, max_tokens=6, response_format=wanted
                    )
                )
                other = await client.chat.completions.create(model="base", messages=ASK, max_tokens=2)
                assert other.choices[0].message.content is not None
                (found,) = await asyncio.gather(nasty, return_exceptions=True)
                if isinstance(found, Exception):
                    assert isinstance(found, APIStatusError), (name, found)
                    assert (found.status_code, found.param) == (400, "response_format"), (name, found)
                else:
                    assert found.choices[0].finish_reason in ("stop", "length")
            assert house.stub.state()["waiting"] == 0

    go(main)
