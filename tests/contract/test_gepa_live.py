"""The prompt of the embedded base, optimised by the real gepa; a stand-in endpoint proposes instructions.

`make test-gepa` installs the package into a folder of its own.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from graftwork.api.project import open_project

pytest.importorskip("gepa")

BETTER = "Reply with the word blue and nothing else. Always write: blue"


@pytest.fixture
def reflection():
    """Proposes the same instruction each time, and keeps what it was shown."""
    shown = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            shown.append(body["messages"][-1]["content"])
            message = {"role": "assistant", "content": f"Better:\n```\n{BETTER}\n```"}
            reply = {"choices": [{"message": message, "finish_reason": "stop", "index": 0}]}
            data = json.dumps(reply | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1#stand-in", shown
    server.shutdown()


def write_project(folder, reflection):
    objects = ("sky", "sea", "flag", "bird", "car", "door", "lamp", "hat", "cup", "pen", "wall", "shoe")
    lines = []
    for number, name in enumerate(objects * 4):
        question = f"Which colour has the {name} in picture {number} on page {number * 7}?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "blue"}]
        lines.append(json.dumps({"id": str(number), "messages": turns}))
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "project": "colours",
        "base": "smollm2-135m-instruct",
        "data": {
            "logs": ["log.jsonl"],
            "test": 0.3,
            "validation": 0.2,
            "near_duplicate": 1.0,
            "question_similarity": 1.0,
        },
        "evaluate": {
            "max_new_tokens": 8,
            "max_cases": 4,
            "latency_cases": 1,
            "fields": {"form": "text"},
            "metrics": ["token_f1"],
            "checks": [{"name": "colour", "contains": "blue"}],
            "costs": {"success": "colour"},
            "prompt": {"examples": 0, "optimizer": "gepa", "reflection": reflection, "max_answers": 40},
        },
        "gate": {"rules": [{"metric": "colour", "over": 0.0}], "primary": "none"},
    }
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.slow
def test_gepa_improves_the_prompt_of_a_real_model_within_its_budget(tmp_path, reflection):
    url, shown = reflection
    write_project(tmp_path, url)
    project = open_project(tmp_path)
    report = project.evaluate(("base", "base+prompt"), limit=4).report
    assert shown, "the proposer was asked"
    assert "A right answer is: blue" in shown[0]
    [found] = tmp_path.glob(".graft/evaluations/prompt-search-*/prompt.json")
    prompt = json.loads(found.read_text())
    assert prompt["instruction"] == BETTER
    first, best = (float(part) for part in prompt["optimizer"].split(": ")[1].split(" on ")[0].split(" → "))
    assert best > first
    subjects = {subject.subject: subject for subject in (report.baseline, report.candidate, *report.others)}
    rates = {name: subject.metrics["colour"].value for name, subject in subjects.items()}
    assert rates["base+prompt"] >= rates["base"]
