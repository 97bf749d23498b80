"""A stand-in for the OpenAI API: the same answer to the same question, with tools, streams and failures."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {
    "Where is the station?": "The station is next to the river.",
    "Tell me everything.": "Everything begins with",
    "Stream it.": "Here it comes, piece by piece.",
}
WEATHER = {"city": "Bern"}
USAGE = {
    "prompt_tokens": 21,
    "completion_tokens": 9,
    "total_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def answer(body: dict) -> tuple[dict, str]:
    """The message and its finish reason."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": "It is sunny in Bern."}, "stop"
    question = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    if "weather" in question:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps(WEATHER)},
        }
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    reason = "length" if question == "Tell me everything." else "stop"
    return {"role": "assistant", "content": ANSWERS.get(question, f"You said: {question}")}, reason


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._say({"version": "3.0.0", "status": "OK", "data": [], "batch_ingest_config": {}})

    def do_POST(self) -> None:
        raw = self._read()
        if self.path.endswith("/responses"):
            return self._say(make_response(json.loads(raw)))
        if not self.path.endswith("/chat/completions"):
            self.server.received.append((self.path, dict(self.headers), raw))  # type: ignore[attr-defined]
            return self._say({})
        body = json.loads(raw)
        if body["messages"][-1]["content"] == "Fail.":
            return self._say({"error": {"message": "overloaded", "type": "server_error"}}, status=500)
        message, reason = answer(body)
        if body.get("stream"):
            return self._stream(body, message, reason)
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return self._say(make_completion(body, "chat.completion", [choice], usage=USAGE))

    def _read(self) -> bytes:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _stream(self, body: dict, message: dict, reason: str) -> None:
        text = message["content"]
        is_cut = body["messages"][-1]["content"] == "Stream half."
        pieces = [text[place : place + 8] for place in range(0, len(text), 8)]
        chunks = [{"index": 0, "delta": {"content": piece}, "finish_reason": None} for piece in pieces]
        chunks = chunks[:1] if is_cut else [*chunks, {"index": 0, "delta": {}, "finish_reason": reason}]
        lines = [make_completion(body, "chat.completion.chunk", [chunk]) for chunk in chunks]
        if not is_cut:
            lines.append(make_completion(body, "chat.completion.chunk", [], usage=USAGE))
        data = b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)
        data += b"" if is_cut else b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data) + 100 * is_cut))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def _say(self, body: object, *, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def make_completion(body: dict, kind: str, choices: list, **more: object) -> dict:
    return {
        "id": "chatcmpl-1",
        "object": kind,
        "created": 1760000000,
        "model": f"{body['model']}-2026",
        "choices": choices,
        **more,
    }


def make_response(body: dict) -> dict:
    text = {"type": "output_text", "text": "The station is next to the river.", "annotations": []}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1760000000,
        "status": "completed",
        "model": body["model"],
        "instructions": body.get("instructions"),
        "output": [message],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": {
            "input_tokens": 21,
            "output_tokens": 9,
            "total_tokens": 30,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


@contextmanager
def running() -> Iterator[ThreadingHTTPServer]:
    """A server at `url`; requests to other paths are kept in `received`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.received = []  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
