"""The admin listener, TLS, CORS, logs, histograms and spans, over real sockets."""

import asyncio
import datetime
import io
import json
import logging
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serve_harness import DEADLINE, RELEASE, ListSink, open_house, raw

from free_ports import free_port
from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.http.messages import Response
from graftwork.http.server import Server
from graftwork.pipeline.status import ask_endpoint
from graftwork.records.errors import UserError
from graftwork.serve.captures import read_totals
from graftwork.serve.keys import ApiKey, KeyRing, digest_secret
from graftwork.serve.request_log import AccessLog, BackgroundBatches, log_as_json
from graftwork.serve.run import ServedProject, list_listeners, open_keys, open_tls, serve
from graftwork.serve.settings import ServeSettings

SECRET_PROMPT = "my secret prompt"
BODY = json.dumps({"messages": [{"role": "user", "content": SECRET_PROMPT}]}).encode()
JSON = (("content-type", "application/json"),)


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
        with pytest.raises(UserError) as refused:
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
    files = SimpleNamespace(certificate=folder / "cert.pem", key=folder / "key.pem")
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.key.write_bytes(key.private_bytes(encoding, *plain))
    files.certificate.write_bytes(certificate.public_bytes(encoding))
    return files


@asynccontextmanager
async def tls_server(files):
    async def answer(_request):
        return Response(200, b"{}")

    server = Server(answer)
    port = await server.listen(tls=open_tls(str(files.certificate), str(files.key)))
    try:
        yield port
    finally:
        await server.close()


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
    with pytest.raises(UserError) as refused:
        open_tls(str(tmp_path / "no"), str(tmp_path / "no"))
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
            house.answers.observe = log.note
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
        noted = []
        async with open_house() as house:
            house.answers.observe = noted.append
            house.engine.describe = lambda: 1 / 0
            assert (await get(house.port, "/health"))[0].status == 500
            assert [request.status for request in noted] == [500]

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
                engine_module="stub_engine",
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
