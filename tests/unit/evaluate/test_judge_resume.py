"""A judge run that was killed goes on: what was said is kept, and only what was under way is asked again."""

import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gate_samples import new_answer, new_case, new_generation

from graftwork.evaluate.judge import judge_subjects, open_judge
from graftwork.evaluate.judge_statistics import add_judgment
from graftwork.evaluate.settings import JudgeSettings
from graftwork.records.report import Report, SubjectReport

CASES = [new_case(f"case {n}", f"Question {n}?", "six") for n in range(12)]
RUN = """
import sys, json
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_judge_resume import CASES, judge_all
judge_all(sys.argv[1], Path(sys.argv[2]))
"""


def answers_of(text):
    return [new_answer(case.id, text, seconds=0.1) for case in CASES]


def judge_all(url, folder):
    settings = JudgeSettings(url=url, model="m", concurrency=2, price_in=1.0, price_out=1.0)
    return judge_subjects(
        open_judge(settings, folder=folder),
        cases=CASES,
        answers={"base": answers_of("five"), "adapter": answers_of("six")},
        baseline="base",
        candidate="adapter",
    )


@pytest.fixture
def endpoint():
    """Prefers the answer six; says how many questions it heard, and can be waited for."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            first = body["messages"][1]["content"].partition("Answer A:")[2].partition("Answer B:")[0]
            with server.heard:
                server.asked.append(json.dumps(body["messages"]))
                server.heard.notify_all()
            reply = json.dumps({"winner": "A" if "six" in first else "B"})
            usage = {"prompt_tokens": 50, "completion_tokens": 5}
            sent = json.dumps({"choices": [{"message": {"content": reply}}], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_arguments):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.heard = [], threading.Condition()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("after", [1, 9])
def test_a_killed_run_goes_on_where_it_was(endpoint, tmp_path, after):
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    child = subprocess.Popen([sys.executable, "-c", RUN, url, str(tmp_path), str(Path(__file__).parent)])
    with endpoint.heard:
        assert endpoint.heard.wait_for(lambda: len(endpoint.asked) >= after, timeout=300)
    child.send_signal(signal.SIGKILL)
    child.wait()
    tally = judge_all(url, tmp_path)
    assert (tally.wins, tally.losses, tally.pairs) == (12, 0, 12)
    asked = len(endpoint.asked)
    assert len(set(endpoint.asked)) == 24
    # Two at a time: what was under way when the kill came is asked once more, nothing else.
    assert asked <= 24 + 2
    assert judge_all(url, tmp_path).questions == 0
    assert len(endpoint.asked) == asked


def test_a_report_carries_the_judgement_and_its_comparison(endpoint, tmp_path):
    tally = judge_all(f"http://127.0.0.1:{endpoint.server_port}/v1", tmp_path)
    assert tally.questions == 24
    assert tally.cost == pytest.approx(24 * 55 / 1e6)
    generation = new_generation("base", answers=12)
    subject = SubjectReport(subject="base", metrics={}, generation=generation)
    report = Report(cases_hash="x", cases=12, baseline=subject, candidate=subject, comparisons=())
    judged = add_judgment(report, tally)
    assert judged.judged == (tally,)
    [comparison] = judged.comparisons
    assert (comparison.metric, comparison.wins, comparison.losses) == ("judge_preference", 12, 0)
    assert comparison.low <= comparison.difference <= comparison.high
    assert Report.from_json(judged.to_json()) == judged
