"""Writes the trace files of this folder with the libraries that teams use, against a stand-in endpoint.

    pip install --target LIBS openai opentelemetry-sdk opentelemetry-exporter-otlp-proto-http \\
        opentelemetry-instrumentation-openai-v2 openinference-instrumentation-openai langfuse langsmith \\
        mlflow-tracing litellm
    PYTHONPATH=LIBS python tests/data/traces/produce.py [KIND ...]

Each kind runs in a process of its own: instrumentations replace each other.
"""

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import stand_in

HERE = Path(__file__).parent
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Answer briefly."}


def ask_all(client: Any, *, wrap: Callable[[Callable[[], None]], None] = lambda act: act()) -> None:
    """A plain question, a call of a tool with its result, a stream, a cut-off answer and a failure."""
    model = "small-1"

    def plain() -> None:
        turns = [SYSTEM, {"role": "user", "content": "Where is the station?"}]
        client.chat.completions.create(model=model, messages=turns, max_tokens=50)

    def tools() -> None:
        turns: list[Any] = [SYSTEM, {"role": "user", "content": "How is the weather in Bern?"}]
        first = client.chat.completions.create(model=model, messages=turns, tools=TOOLS)
        call = first.choices[0].message.tool_calls[0]
        function = {"name": call.function.name, "arguments": call.function.arguments}
        turns += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny"}'},
        ]
        client.chat.completions.create(model=model, messages=turns, tools=TOOLS)

    def stream() -> None:
        turns = [{"role": "user", "content": "Stream it."}]
        options = {"include_usage": True}
        made = client.chat.completions.create(
            model=model, messages=turns, stream=True, stream_options=options
        )
        for _ in made:
            pass

    def half() -> None:
        turns = [{"role": "user", "content": "Stream half."}]
        try:
            for _ in client.chat.completions.create(model=model, messages=turns, stream=True):
                pass
        except Exception as error:
            print("the stream broke:", type(error).__name__, file=sys.stderr)

    def cut() -> None:
        turns = [{"role": "user", "content": "Tell me everything."}]
        client.chat.completions.create(model=model, messages=turns, max_tokens=3)

    def fail() -> None:
        try:
            turns = [{"role": "user", "content": "Fail."}]
            client.chat.completions.create(model=model, messages=turns)
        except Exception as error:
            print("refused:", type(error).__name__, file=sys.stderr)

    for act in (plain, tools, stream, half, cut, fail):
        wrap(act)


def make_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def to_otlp_json(message: Any) -> dict[str, Any]:
    """OTLP as JSON: ids in hex, unlike the JSON of protobuf."""
    from google.protobuf.json_format import MessageToDict

    def hex_ids(value: Any) -> None:
        for key, inner in list(value.items()) if isinstance(value, dict) else enumerate(value):
            if key in ("traceId", "spanId", "parentSpanId") and isinstance(inner, str):
                value[key] = base64.b64decode(inner).hex()
            elif isinstance(inner, dict | list):
                hex_ids(inner)

    made: dict[str, Any] = MessageToDict(message)
    hex_ids(made)
    return made


def collect() -> tuple[Any, Callable[[str], None]]:
    """A tracer provider, and a function that writes its spans: OTLP JSON, one line a batch."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider = TracerProvider(resource=Resource.create({"service.name": "guide"}))
    memory = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))

    def write(name: str) -> None:
        spans = memory.get_finished_spans()
        lines = [spans[place : place + 3] for place in range(0, len(spans), 3)]
        with (HERE / name).open("w") as out:
            for batch in lines:
                out.write(json.dumps(to_otlp_json(encode_spans(batch))) + "\n")

    return provider, write


def in_agent_span(provider: Any) -> Callable[[Callable[[], None]], None]:
    tracer = provider.get_tracer("guide")

    def wrap(act: Callable[[], None]) -> None:
        attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "guide"}
        with tracer.start_as_current_span("invoke_agent guide", attributes=attributes):
            act()

    return wrap


def make_genai(url: str) -> None:
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "span_only"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    provider, write = collect()
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    ask_all(make_client(url), wrap=in_agent_span(provider))
    write("genai.otlp.jsonl")


def make_genai_events(url: str) -> None:
    """Spans without content, and the content in log records: one event a message up to version 2.1 of the
    instrumentation, one event a call after it.
    """
    from importlib.metadata import version

    is_old = version("opentelemetry-instrumentation-openai-v2") < "2.2"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "true" if is_old else "event_only"
    if not is_old:
        os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._logs import LoggerProvider, export

    provider, write = collect()
    logs = LoggerProvider()
    kind = getattr(export, "InMemoryLogExporter", None) or export.InMemoryLogRecordExporter
    memory = kind()
    logs.add_log_record_processor(export.SimpleLogRecordProcessor(memory))
    given: dict[str, Any] = {"logger_provider": logs}
    if is_old:
        from opentelemetry.sdk._events import EventLoggerProvider

        given = {"event_logger_provider": EventLoggerProvider(logs)}
    OpenAIInstrumentor().instrument(tracer_provider=provider, **given)
    ask_all(make_client(url), wrap=in_agent_span(provider))
    name = "genai_messages" if is_old else "genai_events"
    write(f"{name}.otlp.jsonl")
    line = json.dumps(to_otlp_json(encode_logs(memory.get_finished_logs())))
    (HERE / f"{name}.otlp_logs.jsonl").write_text(line + "\n")


def make_openinference(url: str) -> None:
    from openinference.instrumentation import using_session
    from openinference.instrumentation.openai import OpenAIInstrumentor

    provider, write = collect()
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    with using_session("session-7"):
        ask_all(make_client(url), wrap=in_agent_span(provider))
    write("openinference.otlp.jsonl")
    lines = (HERE / "openinference.otlp.jsonl").read_text().splitlines()
    print(len(lines), "lines", file=sys.stderr)


def make_sdk(url: str) -> None:
    """Spans as the SDK's console exporter writes them, one JSON object after another."""
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "span_only"
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    provider = TracerProvider()
    with (HERE / "console.json").open("w") as out:
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out)))
        OpenAIInstrumentor().instrument(tracer_provider=provider)
        ask_all(make_client(url), wrap=in_agent_span(provider))


def make_exporter(url: str) -> None:
    """The body that the OTLP exporter sends over HTTP: protobuf in gzip."""
    os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"] = "gen_ai_latest_experimental"
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "span_only"
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "guide"}))
    exporter = OTLPSpanExporter(endpoint=f"{url}/v1/traces", compression=Compression.Gzip)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    ask_all(make_client(url), wrap=in_agent_span(provider))
    provider.shutdown()


def save_exporter(server: Any) -> None:
    [body] = [raw for path, _, raw in server.received if path.endswith("/v1/traces")]
    (HERE / "exporter.pb.gz").write_bytes(body)


def make_langfuse(url: str) -> None:
    """What Langfuse's SDK sends to its server, which is OTLP."""
    os.environ |= {
        "LANGFUSE_PUBLIC_KEY": "pk-none",
        "LANGFUSE_SECRET_KEY": "sk-none",
        "LANGFUSE_HOST": url,
        "LANGFUSE_BASE_URL": url,
        "OPENAI_API_KEY": "none",
    }
    import langfuse
    from langfuse.openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ask_all(client)
    langfuse.get_client().flush()


def save_langfuse(server: Any) -> None:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with (HERE / "langfuse.otlp.jsonl").open("w") as out:
        for path, headers, raw in server.received:
            if "otel" in path:
                packed = "gzip" in str(headers)
                message = ExportTraceServiceRequest.FromString(gzip.decompress(raw) if packed else raw)
                out.write(json.dumps(to_otlp_json(message)) + "\n")


def make_mlflow(url: str) -> None:
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false"}
    import mlflow

    mlflow.set_tracking_uri(tempfile.mkdtemp())
    mlflow.set_experiment("guide")
    mlflow.openai.autolog()
    client = make_client(url)

    def wrap(act: Callable[[], None]) -> None:
        @mlflow.trace(name="guide", span_type="AGENT")
        def run() -> None:
            mlflow.update_current_trace(metadata={"mlflow.trace.session": "session-7"})
            act()

        run()

    written = []

    def keep(act: Callable[[], None]) -> None:
        wrap(act)
        written.append(mlflow.get_trace(mlflow.get_last_active_trace_id(), flush=True))

    ask_all(client, wrap=keep)
    judge = mlflow.entities.AssessmentSource(source_type="HUMAN", source_id="reviewer")
    rated = written[0].info.trace_id
    mlflow.log_feedback(trace_id=rated, name="correctness", value=True, source=judge)
    written[0] = mlflow.get_trace(rated, flush=True)
    with (HERE / "mlflow.jsonl").open("w") as out:
        out.writelines(trace.to_json() + "\n" for trace in written if trace is not None)


def make_langsmith(url: str) -> None:
    """Runs as the SDK sends them, which are the columns of an export."""
    os.environ |= {
        "LANGSMITH_TRACING": "true",
        "LANGSMITH_ENDPOINT": url,
        "LANGSMITH_API_KEY": "none",
        "LANGSMITH_HIDE_METADATA": "false",
    }
    import langsmith
    from langsmith import run_trees, traceable
    from langsmith.wrappers import wrap_openai

    ended: list[Any] = []

    class Client(langsmith.Client):
        def create_run(self, *arguments: Any, **options: Any) -> None:
            pass

        def update_run(self, *arguments: Any, **options: Any) -> None:
            pass

    kept = run_trees.RunTree.patch

    def patch(self: Any, **options: Any) -> None:
        ended.append(json.loads(self.json()) if hasattr(self, "json") else self.dict())
        kept(self, **options)

    run_trees.RunTree.patch = patch
    client = wrap_openai(make_client(url))

    def wrap(act: Callable[[], None]) -> None:
        traceable(name="guide", run_type="chain", metadata={"session_id": "session-7"}, client=Client())(
            act
        )()

    ask_all(client, wrap=wrap)
    with (HERE / "langsmith.jsonl").open("w") as out:
        for run in ended:
            run.pop("serialized", None)
            run.pop("events", None)
            runtime = run.get("extra") or {}
            runtime.pop("runtime", None)
            out.write(json.dumps(run, default=str) + "\n")


def make_litellm(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    payloads: list[Any] = []

    def keep(options: Any, *_rest: Any) -> None:
        payloads.append(options["standard_logging_object"])

    litellm.success_callback = [keep]
    litellm.failure_callback = [keep]
    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai"}
    litellm.register_model({name: {**price, "mode": "chat"} for name in ("small-1", "small-1-2026")})

    class Completions:
        def create(self, **options: Any) -> Any:
            model = f"openai/{options.pop('model')}"
            return litellm.completion(
                model=model, api_base=f"{url}/v1", api_key="none", num_retries=0, **options
            )

    class Chat:
        completions = Completions()

    class Client:
        chat = Chat()

    ask_all(Client())
    import time

    time.sleep(2)
    with (HERE / "litellm.jsonl").open("w") as out:
        for payload in payloads:
            out.write(json.dumps(payload, default=str) + "\n")


def make_openai(url: str) -> None:
    """Completions and responses as the client returns them, with the messages that were asked."""
    client = make_client(url)
    turns = [SYSTEM, {"role": "user", "content": "Where is the station?"}]
    completion = client.chat.completions.create(model="small-1", messages=turns, store=True)
    response = client.responses.create(
        model="small-1", instructions="Answer briefly.", input="Where is the station?"
    )
    question = {"role": "user", "content": "Where is the station?", "type": "message"}
    (HERE / "openai_stored.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in (
                {**completion.to_dict(), "messages": turns},
                {**response.to_dict(), "input": [question]},
            )
        )
    )


KINDS: dict[str, Callable[[str], None]] = {
    "genai": make_genai,
    "genai_events": make_genai_events,
    "openinference": make_openinference,
    "sdk": make_sdk,
    "exporter": make_exporter,
    "langfuse": make_langfuse,
    "mlflow": make_mlflow,
    "langsmith": make_langsmith,
    "litellm": make_litellm,
    "openai": make_openai,
}


_MACHINE = re.compile(r"Traceback \(most recent call last\).*", re.DOTALL)
_DROPPED = ("mlflow.source", "mlflow.user", "mlflow.artifact", "hidden_params", "model_map", "traceback")


def scrub(value: Any) -> Any:
    """Remove what describes the machine, not the trace."""
    if isinstance(value, dict):
        return {key: scrub(inner) for key, inner in value.items() if not key.startswith(_DROPPED)}
    if isinstance(value, list):
        return [scrub(inner) for inner in value]
    return _MACHINE.sub("Traceback", value) if isinstance(value, str) else value


def scrub_files() -> None:
    for path in HERE.glob("*.jsonl"):
        rows = [scrub(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = HERE / "console.json"
    if console.exists():
        text = console.read_text()
        console.write_text(re.sub(r'"Traceback [^\n]*"', '"Traceback"', text))


def main() -> None:
    chosen = sys.argv[1:] or list(KINDS)
    if len(chosen) > 1:
        for kind in chosen:
            subprocess.run([sys.executable, __file__, kind], check=False)
        return
    with stand_in.running() as server:
        KINDS[chosen[0]](server.url)
        if chosen[0] == "exporter":
            save_exporter(server)
        if chosen[0] == "langfuse":
            save_langfuse(server)
    scrub_files()


if __name__ == "__main__":
    main()
