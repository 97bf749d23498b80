"""The admin listener, TLS, CORS, logs, histograms and spans, over real sockets."""

import asyncio
import datetime
import io
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serve_harness import DEADLINE, RELEASE, ListSink, open_house, raw

from free_ports import free_port
from graftwork.pipeline.status import ask_endpoint
from graftwork.records.errors import UserMistake
from graftwork.serve.background import BackgroundBatches
from graftwork.serve.capture_journal import read_totals
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.http_messages import Response
from graftwork.serve.http_server import Server
from graftwork.serve.keys import ApiKey, KeyRing, digest_secret
from graftwork.serve.operations import Operations, list_listeners, open_keys
from graftwork.serve.otlp import parse_json
from graftwork.serve.request_log import AccessLog, FinishedRequest, log_as_json
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings
from graftwork.serve.spans import SpanExporter, encode_spans, read_headers
from graftwork.serve.tls import CertificateFiles, follow_certificate, open_tls

SECRET_PROMPT = "my secret prompt"
BODY = json.dumps({"messages": [{"role": "user", "content": SECRET_PROMPT}]}).encode()
JSON = (("content-type", "application/json"),)


class Noted:
    def __init__(self):
        self.requests = []

    def note(self, request):
        self.requests.append(request)


async def chat(port, body=BODY, headers=JSON, path="/v1/chat/completions"):
    reply = await Client(port=port).send("POST", path, body=body, headers=headers)
    return reply, await reply.read()


async def get(port, path, *headers):
    reply = await Client(port=port).send("GET", path, headers=headers)
    return reply, await reply.read()


async def until(condition):
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


# -- the admin listener ------------------------------------------------------------------------


def test_with_an_admin_listener_the_public_one_shows_neither_metrics_nor_details(run):
    async def main():
        settings = ServeSettings(port=0, admin_port=0)
        async with open_house(settings=settings) as house:
            _, admin = list_listeners(house.gateway, settings)
            port = await admin.server.listen(host=admin.host, port=admin.port)
            try:
                assert (await get(house.port, "/metrics"))[0].status == 404
                assert json.loads((await get(house.port, "/health"))[1]) == {"status": "ok"}
                assert b"graft_in_flight" in (await get(port, "/metrics"))[1]
                assert "engine" in json.loads((await get(port, "/health"))[1])
                assert (await chat(port))[0].status in (404, 413)
                assert (await get(port, "/v1/models"))[0].status == 404
            finally:
                await admin.server.close()

    run(main)


def test_the_admin_listener_asks_for_the_key_too(run):
    async def main():
        settings = ServeSettings(port=0, admin_port=0)
        async with open_house(settings=settings, keys=KeyRing("right")) as house:
            _, admin = list_listeners(house.gateway, settings)
            port = await admin.server.listen(host=admin.host, port=admin.port)
            try:
                assert (await get(port, "/metrics"))[0].status == 401
                assert (await get(port, "/metrics", ("x-api-key", "right")))[0].status == 200
                assert json.loads((await get(port, "/health"))[1]) == {"status": "ok"}
            finally:
                await admin.server.close()

    run(main)


def test_an_admin_listener_that_others_can_reach_needs_a_key(run):
    async def main():
        for settings in (ServeSettings(), ServeSettings(admin_host="0.0.0.0")):
            assert not (await open_keys(settings, tuple)).required  # there is no admin listener
        with pytest.raises(UserMistake) as refused:
            await open_keys(ServeSettings(admin_port=0, admin_host="0.0.0.0"), tuple)
        assert refused.value.where == "serve.admin_host"

    run(main)


# -- TLS ---------------------------------------------------------------------------------------


def write_certificate(folder, name="one"):
    """A certificate for this machine, signed by itself; `name` is in its subject."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    files = CertificateFiles(folder / "cert.pem", folder / "key.pem")
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.key.write_bytes(key.private_bytes(encoding, *plain))
    files.certificate.write_bytes(certificate.public_bytes(encoding))
    return files


async def served_name(port):
    """The subject of the certificate that a new connection gets."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    data = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(data).subject.rfc4514_string()


@asynccontextmanager
async def tls_server(files):
    async def answer(_request):
        return Response(200, b"{}")

    known, context = files.state(), open_tls(files)
    server = Server(answer)
    port = await server.listen(tls=context)
    following = asyncio.create_task(follow_certificate(context, files, known=known, seconds=0.01))
    try:
        yield port
    finally:
        following.cancel()
        await server.close()


def test_a_renewed_certificate_is_served_without_a_restart(run, tmp_path):
    async def main():
        async with tls_server(write_certificate(tmp_path, "one")) as port:
            assert await served_name(port) == "CN=one"
            write_certificate(tmp_path, "two")
            async with asyncio.timeout(DEADLINE):
                while await served_name(port) != "CN=two":
                    await asyncio.sleep(0.01)

    run(main)


def test_a_certificate_that_does_not_fit_its_key_leaves_the_old_one_in_place(run, tmp_path, caplog):
    async def main():
        files = write_certificate(tmp_path, "one")
        async with tls_server(files) as port:
            files.certificate.write_text("half of a cert")
            await until(lambda: "cannot be used" in caplog.text)
            assert await served_name(port) == "CN=one"

    run(main)


def test_https_answers_and_plain_http_does_not(run, tmp_path):
    async def main():
        files = write_certificate(tmp_path)
        async with tls_server(files) as port:
            context = ssl.create_default_context(cafile=str(files.certificate))
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
            answer = b""
            with suppress(ConnectionError):
                answer = await raw(port, b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert b"200" not in answer

    run(main)


def test_a_certificate_that_cannot_be_read_is_a_clear_mistake(tmp_path):
    settings = ServeSettings(tls_certificate=str(tmp_path / "no"), tls_key=str(tmp_path / "no"))
    with pytest.raises(UserMistake) as refused:
        Operations(settings)
    assert refused.value.fix


def test_half_of_a_certificate_is_refused():
    with pytest.raises(ValueError, match="both"):
        ServeSettings(tls_certificate="cert.pem")


# -- CORS --------------------------------------------------------------------------------------

ORIGIN = ("origin", "https://app.example.org")


def preflight(origin, more=""):
    lines = f"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\n"
    return f"{lines}access-control-request-method: POST\r\nconnection: close\r\n{more}\r\n".encode()


def test_no_header_of_cors_is_sent_by_default(run):
    async def main():
        async with open_house() as house:
            reply, _ = await chat(house.port, headers=(*JSON, ORIGIN))
            assert not [name for name in dict(reply.headers) if "access-control" in name.lower()]
            assert b"access-control" not in await raw(house.port, preflight(ORIGIN[1]))

    run(main)


def test_pages_of_named_origins_may_ask_and_others_may_not(run):
    async def main():
        settings = ServeSettings(cors_origins=(ORIGIN[1],))
        async with open_house(settings=settings, keys=KeyRing("right")) as house:
            allowed = await raw(house.port, preflight(ORIGIN[1]))
            assert allowed.startswith(b"HTTP/1.1 204")
            assert b"access-control-allow-origin: https://app.example.org\r\n" in allowed
            refused = await raw(house.port, preflight("https://evil.example"))
            assert refused.startswith(b"HTTP/1.1 403")
            assert b"access-control" not in refused
            key = ("authorization", "Bearer right")
            reply, _ = await chat(house.port, headers=(*JSON, ORIGIN, key))
            assert dict(reply.headers)["access-control-allow-origin"] == ORIGIN[1]
            reply, _ = await chat(house.port, headers=(*JSON, ("origin", "https://evil.example"), key))
            assert "access-control-allow-origin" not in dict(reply.headers)
            reply, _ = await chat(house.port, headers=(*JSON, ORIGIN))
            assert reply.status == 401  # the key is needed all the same

    run(main)


@pytest.mark.parametrize("body", ["content-length: 1000\r\n", "transfer-encoding: chunked\r\n"])
def test_a_preflight_request_with_a_body_is_refused_before_the_body_is_read(run, body):
    async def main():
        settings = ServeSettings(cors_origins=(ORIGIN[1],))
        async with open_house(settings=settings, keys=KeyRing("right")) as house:
            answer = await raw(house.port, preflight(ORIGIN[1], body))
            assert answer.startswith(b"HTTP/1.1 400")

    run(main)


# -- logs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [True, False])
def test_the_access_log_has_every_request_and_no_text_of_a_client(run, as_json):
    async def main():
        lines = io.StringIO()
        log = AccessLog(as_json=as_json, stream=lines)
        log.start()
        async with open_house(ListSink(), keys=KeyRing("right-key")) as house:
            house.gateway.observers = (log,)
            key = ("authorization", "Bearer right-key")
            streamed = json.dumps({**json.loads(BODY), "stream": True}).encode()
            for body in (BODY, streamed, b"{"):
                await chat(house.port, body, (*JSON, key))
            await chat(house.port, BODY, JSON)
            await get(house.port, "/v1/models?q=query-text", key)
            await get(house.port, "/private-path-text", key)
        log.close()
        return lines.getvalue().splitlines()

    lines = run(main)
    for text in ("secret prompt", "right-key", "query-text", "private-path-text"):
        assert text not in "\n".join(lines)
    if not as_json:
        assert any(f"key=serve.api_key_env model=champion release={RELEASE[:12]}" in line for line in lines)
        return
    entries = [json.loads(line) for line in lines]
    assert sorted(entry["status"] for entry in entries) == [200, 200, 200, 400, 401, 404]
    answered = [entry for entry in entries if entry.get("release") == RELEASE]
    assert len(answered) == 2
    assert all(entry["reply_tokens"] > 0 and entry["key"] == "serve.api_key_env" for entry in answered)
    assert [entry["path"] for entry in entries if entry["status"] == 404] == ["other"]


def test_a_request_that_fails_in_an_unexpected_way_is_logged_as_500(run):
    async def main():
        noted = Noted()
        async with open_house() as house:
            house.gateway.observers = (noted,)
            house.engine.describe = lambda: 1 / 0
            assert (await get(house.port, "/health"))[0].status == 500
            assert [request.status for request in noted.requests] == [500]

    run(main)


def test_messages_are_json_lines_and_tracebacks_quote_nothing():
    stream = io.StringIO()
    with log_as_json(stream):
        log = logging.getLogger("graftwork.serve.test")
        log.info("started %d", 3)
        try:
            int(SECRET_PROMPT)
        except ValueError:
            log.exception("it failed")
    logging.getLogger("graftwork.serve.test").warning("not here")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"]) == ("started 3", "info")
    assert second["error"] == "ValueError"
    assert SECRET_PROMPT not in stream.getvalue()


def test_a_stuck_reader_of_logs_costs_lines_and_no_time():
    stuck, gate = threading.Event(), threading.Event()

    def work(_batch):
        stuck.set()
        gate.wait(DEADLINE)

    batches = BackgroundBatches(work, name="test", limit=10, seconds=0.0)
    batches.start()
    batches.offer(0)
    assert stuck.wait(DEADLINE)
    for number in range(15):
        batches.offer(number)
    assert batches.dropped == 5
    gate.set()
    batches.close()


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_have_histograms_of_times_and_tokens_and_what_keys_used(run):
    async def main():
        async with open_house(keys=KeyRing("right")) as house:
            key = ("authorization", "Bearer right")
            await chat(house.port, BODY, (*JSON, key))
            return (await get(house.port, "/metrics", key))[1].decode()

    text = run(main)
    for name in ("answer_seconds", "first_token_seconds", "prompt_tokens", "reply_tokens"):
        assert f"# TYPE graft_{name} histogram" in text
        assert f"graft_{name}_count 1" in text
        assert f'graft_{name}_bucket{{le="+Inf"}} 1' in text
    assert 'graft_key_requests_total{key="serve.api_key_env"} 1' in text
    assert "graft_queue_seconds_count 0" in text


# -- spans -------------------------------------------------------------------------------------


class Collector:
    """Takes OTLP over HTTP, or answers with a status."""

    def __init__(self):
        self.bodies = []
        self.status = 200
        self.headers = {}

    async def answer(self, request):
        self.headers = request.headers
        if self.status == 200:
            self.bodies.append(parse_json(request.body))
        return Response(self.status, b"{}")

    def spans(self):
        return [
            span
            for body in self.bodies
            for resource in body["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


def attributes(span):
    return {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}


def test_each_answer_is_a_span_of_the_clients_trace_without_its_text(run):
    async def main():
        collector = Collector()
        server = Server(collector.answer)
        port = await server.listen()
        url = f"http://127.0.0.1:{port}/v1/traces"
        exporter = SpanExporter(url, service="svc", headers={"authorization": "Bearer c"})
        exporter.start()
        async with open_house(ListSink()) as house:
            house.gateway.observers = (exporter,)
            parent = ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")
            await chat(house.port, BODY, (*JSON, parent))
            await chat(house.port, b'{"model": "nobody", "messages": []}')
            await get(house.port, "/v1/models")
            await until(lambda: len(collector.spans()) == 2)
        await asyncio.to_thread(exporter.close)
        await server.close()
        assert exporter.sent == 2
        return collector

    collector = run(main)
    assert collector.headers["authorization"] == "Bearer c"
    good, bad = collector.spans()
    assert (good["traceId"], good["parentSpanId"]) == ("a" * 32, "b" * 16)
    assert (good["name"], good["kind"]) == ("chat champion", 2)
    found = attributes(good)
    assert found["gen_ai.response.model"] == RELEASE
    assert found["gen_ai.operation.name"] == "chat"
    assert int(found["gen_ai.usage.output_tokens"]) > 0
    assert int(good["endTimeUnixNano"]) > int(good["startTimeUnixNano"])
    assert bad["status"] == {"code": 2}
    assert SECRET_PROMPT not in json.dumps(collector.bodies)


def test_a_collector_that_fails_costs_spans_and_no_answer(run):
    async def main():
        collector = Collector()
        collector.status = 400
        server = Server(collector.answer)
        port = await server.listen()
        exporter = SpanExporter(f"http://127.0.0.1:{port}/v1/traces", service="svc", headers={})
        exporter.start()
        async with open_house() as house:
            house.gateway.observers = (exporter,)
            for _ in range(3):
                assert (await chat(house.port))[0].status == 200
            await until(lambda: exporter.dropped == 3)
        await asyncio.to_thread(exporter.close)
        await server.close()

    run(main)


def test_spans_are_read_back_by_our_own_intake():
    request = FinishedRequest(time.time(), 0.5, "POST", "/v1/chat/completions", 200, model="m", release="r")
    body = parse_json(encode_spans([request], service="svc"))
    assert len(body["resourceSpans"][0]["scopeSpans"][0]["spans"]) == 1


def test_headers_for_the_collector_have_the_form_of_opentelemetry(monkeypatch):
    monkeypatch.setenv("OTLP_HEADERS", "Authorization=Bearer%20x, x-team = a=b,nonsense")
    assert read_headers("OTLP_HEADERS") == {"authorization": "Bearer x", "x-team": "a=b"}
    assert read_headers(None) == {}


# -- the whole endpoint ------------------------------------------------------------------------


def test_a_whole_endpoint_has_keys_tls_and_an_admin_listener(run, tmp_path, capfd):
    async def main():
        files = write_certificate(tmp_path)
        admin_port = free_port()
        settings = ServeSettings(
            port=0,
            admin_port=admin_port,
            tls_certificate=str(files.certificate),
            tls_key=str(files.key),
            access_log=True,
            log_format="json",
        )
        key = ApiKey(
            id="1", name="ci", digest=digest_secret("secret"), created_at="", scopes=("models", "admin")
        )
        project = ServedProject(
            resolve_aliases=lambda: {"champion": RELEASE}, captures=ListSink(), load_keys=lambda: (key,)
        )
        job = EngineJob(folder=str(tmp_path / "engine"), base_folder="none", adapters={RELEASE: "none"})
        ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
        task = asyncio.create_task(
            serve(
                settings,
                engine_job=job,
                project=project,
                on_ready=ready.set_result,
                stop=stop,
                engine_module="graftwork.serve.stub_engine",
            )
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        url = ready.result()
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(files.certificate))
        trusted.check_hostname = False

        def ask(address, path, body=None, key="secret"):
            headers = {**dict(JSON), "authorization": f"Bearer {key}"}
            request = urllib.request.Request(address + path, data=body, headers=headers)
            try:
                with urllib.request.urlopen(request, context=trusted, timeout=DEADLINE) as reply:
                    return reply.status, reply.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        assert (await asyncio.to_thread(ask, url, "/v1/chat/completions", BODY))[0] == 200
        assert (await asyncio.to_thread(ask, url, "/v1/chat/completions", BODY, "wrong"))[0] == 401
        status, health = await asyncio.to_thread(ask, f"https://127.0.0.1:{admin_port}", "/health")
        assert (status, json.loads(health)["keys"]["ci"]["requests_today"]) == (200, 1)
        shown = await asyncio.to_thread(ask_endpoint, settings.model_copy(update={"port": 1}))
        assert (shown.state, shown.url) == ("ok", f"https://127.0.0.1:{admin_port}")
        stop.set()
        await task

    run(main)
    logged = capfd.readouterr().err
    entries = [json.loads(line) for line in logged.splitlines() if line.startswith('{"event":"request"')]
    assert [(entry["status"], entry.get("key")) for entry in entries] == [(200, "ci"), (401, None)]
    assert SECRET_PROMPT not in logged
    assert read_totals(tmp_path / "engine").kept == 1
