"""What the page reads from the endpoint: its state, its errors and its fallbacks."""

import json
import ssl
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served_page import serve

from graftwork.api.endpoint import EndpointCounts, list_endpoint_models, parse_counts, read_endpoint_counts
from graftwork.api.project import open_project
from graftwork.serve.metrics import Metrics


def make_metrics() -> str:
    metrics = Metrics()
    for status, count in ((200, 90), (404, 4), (429, 2), (503, 4)):
        metrics.requests["champion", status] = count
    metrics.fell_back["champion", "1487583f", 'the "first" failed'] = 3
    return metrics.render({})


def test_counts_are_read_from_what_the_gateway_writes():
    assert parse_counts(make_metrics()) == EndpointCounts(requests=100, errors=4, refused=6, fallbacks=3)


@pytest.mark.parametrize("text", ["", "nonsense", "graft_requests_total{} x\n", "graft_requests_total 5\n"])
def test_other_text_counts_nothing(text):
    assert parse_counts(text) == EndpointCounts()


@contextmanager
def answering(answers: dict[str, str], tls: ssl.SSLContext | None = None):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answers.get(self.path, "").encode()
            self.send_response(200 if body else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def part_of(shop, port: int) -> str:
    settings = shop / "graft.yaml"
    settings.write_text(settings.read_text() + f"serve: {{port: {port}}}\n")
    with serve(shop) as served:
        return served.visitor.get("/parts/endpoint").text


def test_the_page_shows_errors_and_fallbacks_of_a_running_endpoint(shop):
    health = json.dumps({"status": "ok", "aliases": {}, "engine": {}})
    with answering({"/health": health, "/metrics": make_metrics()}) as port:
        text = part_of(shop, port)
    assert "<dt>Errors</dt>" in text
    assert "4 %" in text
    assert "<dt>Fallbacks</dt>" in text
    assert "3 %" in text


def test_an_endpoint_that_keeps_its_counts_to_itself_is_still_shown(shop):
    health = json.dumps({"status": "ok", "aliases": {}, "engine": {}})
    with answering({"/health": health}) as port:
        text = part_of(shop, port)
    assert ">ok</span>" in text
    assert "Errors" not in text


def test_an_endpoint_with_a_certificate_of_its_own_is_asked_for_its_counts_and_models(
    empty_project, tmp_path
):
    sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
    from test_serve_operations import write_certificate

    from graftwork.serve.run import open_tls

    files = write_certificate(tmp_path)
    settings = (empty_project / "graft.yaml").read_text()
    models = json.dumps({"data": [{"id": "served-model"}]})
    tls = open_tls(str(files.certificate), str(files.key))
    with answering({"/metrics": make_metrics(), "/v1/models": models}, tls) as port:
        serve_settings = (
            f"serve: {{port: {port}, tls_certificate: {files.certificate}, tls_key: {files.key}}}\n"
        )
        (tmp_path / "graft.yaml").write_text(settings + serve_settings)
        (tmp_path / "logs").symlink_to(empty_project / "logs")
        project = open_project(tmp_path)
        assert list_endpoint_models(project) == ("served-model",)
        assert read_endpoint_counts(project) == EndpointCounts(requests=100, errors=4, refused=6, fallbacks=3)
