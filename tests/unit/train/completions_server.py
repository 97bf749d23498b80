"""A stand-in for vLLM's completions: it samples from a real model and states the log-probabilities it used.

`temperature` other than 1 makes it a sampler that differs from what the trainer computes, honestly stated.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
}
"""What a request must say, because a server takes other defaults from the folder of its model."""
KNOWN = {
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    *PLAIN,
    "seed",
    "logprobs",
    "stop_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
}


class CompletionsServer:
    """Use as a context manager. `answer(tokens, body)` returns new tokens and their log-probabilities."""

    def __init__(self, answer, *, form="token_ids", fail_first=0):
        self.requests, self.loaded = [], []
        self._answer, self._form, self._fail = answer, form, fail_first
        server = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    status, given = server.handle(self.path, body)
                data = json.dumps(given).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def handle(self, path, body):
        if self._fail:
            self._fail -= 1
            return 503, {"error": "busy"}
        if path.endswith("load_lora_adapter"):
            self.loaded.append((path.rpartition("/")[2], body["lora_name"], body.get("lora_path")))
            return 200, {}
        if set(body) != KNOWN or not all(type(token) is int for token in body["prompt"]):
            return 400, {"error": f"unknown fields {sorted(set(body) ^ KNOWN)}"}
        if any(body[name] != value for name, value in PLAIN.items()):
            return 400, {"error": "the distribution is changed"}
        self.requests.append(body)
        tokens, logprobs = self._answer(body["prompt"], body)
        ended = tokens[-1] in body["stop_token_ids"]
        noted = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": logprobs}
        choice = {"logprobs": noted, "finish_reason": "stop" if ended else "length", "text": "?"}
        if self._form == "token_ids":
            choice["token_ids"] = tokens
        if self._form == "text":
            choice["logprobs"] = None
        return 200, {"choices": [choice]}


def sample_from(model, *, temperature=1.0):
    """Answers by a model of transformers, one token at a time."""
    import torch

    def answer(prompt, body):
        chance = torch.Generator().manual_seed(body["seed"])
        tokens, logprobs = [], []
        while len(tokens) < body["max_tokens"]:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float()
            values = torch.log_softmax(logits / temperature, -1)
            token = int(torch.multinomial(values.exp(), 1, generator=chance))
            tokens.append(token)
            logprobs.append(float(values[token]))
            if token in body["stop_token_ids"]:
                break
        return tokens, logprobs

    return answer
