"""Putting a release into service: the first requests decide, here and over a real sshd."""

import http.server
import json
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from registry_samples import PROJECT, dataset, parts, publish_parts, write_adapter

from graftwork.process.worker import hold_lock
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import EnvironmentFailure
from graftwork.registry.deploy import deploy, deploy_here
from graftwork.registry.project import open_store, promote_release
from graftwork.serve.own_endpoint import gateway_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))


class Endpoint:
    """Answers as `graft serve` does: by the release of the alias, or as a test says."""

    def __init__(self, root):
        self.root, self.asked, self.status, self.lag = root, [], 200, 0
        endpoint = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.asked.append((body["messages"][-1]["content"], self.headers["x-session-id"]))
                release = endpoint.release(body["model"])
                answer = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
                if endpoint.status != 200:
                    answer = {"error": {"message": "the engine is down"}}
                text = json.dumps(answer).encode()
                self.send_response(endpoint.status)
                self.send_header("x-graft-release", release)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def release(self, alias):
        with opened(self.root) as work:
            moves = work.releases.alias_log(alias)
            if self.lag > 0:
                # It has not loaded the new one yet.
                self.lag -= 1
                return moves[-1].previous or "base"
            return work.releases.aliases()[alias]


@contextmanager
def opened(root):
    with use_project(open_project(root), NullReporter()) as work:
        yield work


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    endpoint = Endpoint(root)
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "serve": {"port": endpoint.server.server_address[1]},
    }
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    with opened(root) as work, hold_lock(gateway_folder(work.project.serving)):
        yield root, endpoint
    endpoint.server.shutdown()


def make(root, number):
    adapter = write_adapter(root / "runs" / str(number), weights=b"%d" % number)
    with opened(root) as work:
        whole = {**parts(adapter), "dataset": dataset()}
        return publish_parts(folder=open_store(work), index=work.releases, **whole).id


def champion(root):
    with opened(root) as work:
        return work.releases.aliases().get("champion")


def test_a_release_that_answers_stays(project):
    root, endpoint = project
    first = make(root, 1)
    with opened(root) as work:
        done = deploy_here(work, first, requests=2, questions=[[{"role": "user", "content": "where?"}]])
    assert (done.ok, done.asked, done.previous, champion(root)) == (True, 2, None, first)
    assert [question for question, _ in endpoint.asked] == ["where?", "Say in one word that you are ready."]
    assert {session for _, session in endpoint.asked} == {"try-out"}


def test_an_endpoint_that_still_loads_is_waited_for(project):
    root, endpoint = project
    first, second = make(root, 1), make(root, 2)
    with opened(root) as work:
        deploy_here(work, first, requests=1)
        endpoint.lag = 2
        done = deploy_here(work, second, requests=1)
    assert (done.ok, done.previous, len(endpoint.asked)) == (True, first, 4)


def test_the_alias_goes_back_if_the_first_requests_fail(project):
    root, endpoint = project
    first, second = make(root, 1), make(root, 2)
    with opened(root) as work:
        deploy_here(work, first, requests=1)
        endpoint.status = 500
        done = deploy_here(work, second, requests=1)
        moves = work.releases.alias_log("champion")
    assert (done.ok, champion(root)) == (False, first)
    assert "status 500: the engine is down" in done.why
    assert moves[-1].rollback
    assert "first requests failed" in moves[-1].why


def test_the_alias_goes_back_if_the_endpoint_never_takes_the_release(project):
    root, endpoint = project
    first, second = make(root, 1), make(root, 2)
    with opened(root) as work:
        deploy_here(work, first, requests=1)
        endpoint.lag = 10**6
        done = deploy_here(work, second, requests=1, wait_seconds=0.0)
    assert (done.ok, champion(root)) == (False, first)
    assert "is still answered by" in done.why


def test_a_release_that_was_promoted_meanwhile_is_not_rolled_back_for_the_one_that_failed(project):
    """A person sees the failure first, and promotes another one while the endpoint is still asked."""
    root, endpoint = project
    first, second, third = (make(root, number) for number in (1, 2, 3))
    answer = endpoint.release

    def promote_third(alias):
        endpoint.release = answer
        with opened(root) as other:
            promote_release(other, third, reason="the second one fails")
        return answer(alias)

    with opened(root) as work:
        deploy_here(work, first, requests=1)
        endpoint.status, endpoint.release = 500, promote_third
        done = deploy_here(work, second, requests=1)
    assert (done.ok, done.taken_back, done.previous) == (False, False, first)
    assert champion(root) == third


def test_the_release_before_is_the_one_that_the_alias_was_moved_from(project, monkeypatch):
    root, _ = project
    first, second, third = (make(root, number) for number in (1, 2, 3))
    with opened(root) as work:
        promote_release(work, first, reason="a test")

        def promote_after_another(*args, **options):
            with opened(root) as other:
                promote_release(other, third, reason="a moment earlier")
            return promote_release(*args, **options)

        monkeypatch.setattr("graftwork.registry.deploy.promote_release", promote_after_another)
        done = deploy_here(work, second, requests=0)
    assert (done.previous, champion(root)) == (third, second)


def test_without_an_endpoint_the_alias_moves_and_nothing_is_asked(tmp_path):
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": PROJECT, "data": {"logs": ["l.jsonl"]}}))
    first = make(tmp_path, 1)
    with opened(tmp_path) as work:
        done = deploy_here(work, first)
    assert (done.ok, done.asked, done.why) == (True, 0, "no endpoint runs here: nothing was asked")


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    from ssh_server import running_sshd

    with running_sshd(tmp_path_factory.mktemp("sshd")) as command:
        yield command


def test_a_release_is_deployed_over_ssh_and_taken_back_there(project, sshd, tmp_path, monkeypatch):
    far, endpoint = project
    near = tmp_path / "near"
    near.mkdir()
    (near / "graft.yaml").write_text(yaml.safe_dump({"project": PROJECT, "data": {"logs": ["l.jsonl"]}}))
    first, second = make(near, 1), make(near, 2)
    monkeypatch.setenv("GRAFT_SSH", sshd)
    source = Path(__file__).parents[3] / "src"
    graft = f"env PYTHONPATH={source} {sys.executable} -m graftwork.cli.main"
    with opened(near) as work:
        done = deploy(work, first, to=f"127.0.0.1:{far}", graft=graft, requests=1)
        assert (done.ok, done.to, champion(far)) == (True, f"127.0.0.1:{far}", first)
        endpoint.status = 503
        done = deploy(work, second, to=f"127.0.0.1:{far}", graft=graft, requests=1)
        assert (done.ok, champion(far)) == (False, first)
        with pytest.raises(EnvironmentFailure, match="did not take the release"):
            deploy(work, second, to=f"127.0.0.1:{tmp_path / 'nothing'}", graft=graft)
