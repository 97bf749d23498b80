"""Feedback that was answered with 200 is there after the endpoint was killed in that very moment."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.store.captures import FeedbackStore

CHILD = """
import asyncio, sys
from pathlib import Path
from graftwork.project.reporter import NullReporter
from graftwork.serve.project import StoreSink
from graftwork.project.open_project import use_project
from graftwork.project.folder import open_project
from graftwork.engines.protocol import EngineJob
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

root, folder = sys.argv[1:]
with use_project(open_project(Path(root)), NullReporter()) as work:
    sink = StoreSink(work)
    asyncio.run(serve(
        ServeSettings(port=0),
        engine_job=EngineJob(folder=folder, base_folder="none"),
        project=ServedProject(resolve_aliases=dict, captures=sink, feedback=sink),
        on_ready=lambda url: print(url.rpartition(":")[2], flush=True),
        engine_module="stub_engine",
    ))
"""


def post(connection, path, body):
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


@pytest.mark.parametrize("count", [1, 3])
def test_feedback_is_kept_though_the_endpoint_is_killed_at_once(tmp_path, count):
    settings = {"project": "p", "data": {"logs": ["x.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    ids = []
    with (
        tempfile.TemporaryDirectory(prefix="graft-") as folder,  # the path of a socket has to be short
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(Path(folder) / "engine")],
            stdout=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", int(child.stdout.readline()), timeout=300)
            for _ in range(count):
                asked = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
                status, answer = post(connection, "/v1/chat/completions", asked)
                assert status == 200
                ids.append(answer["id"].removeprefix("chatcmpl-"))
                assert post(connection, "/v1/feedback", {"capture": answer["id"], "score": 1})[0] == 200
        finally:
            os.kill(child.pid, signal.SIGKILL)
    with use_project(open_project(tmp_path), NullReporter()) as work:
        assert FeedbackStore(work.database, project="p").count() == count
        assert [capture.feedback for capture in work.captures.export()] == [1.0] * count
