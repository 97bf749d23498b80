"""An engine must have passed the gate with a release before it serves it."""

import json
import urllib.request

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("xllamacpp")

from graftwork.api.project import open_project
from graftwork.cli.main import app
from graftwork.engines.llamacpp import LlamaOptions, LlamaServer
from graftwork.engines.settings import EngineSettings
from graftwork.evaluate.commands import EvaluationRequest, evaluate_asked
from graftwork.evaluate.gate.project import require_engine_gate
from graftwork.files.disk import file_digest
from graftwork.records.errors import NegativeResult, UserError
from graftwork.serve.project import serve_here

ENGINE = EngineSettings(kind="llamacpp", precision="f16", context=512)


def test_a_release_is_served_by_llama_cpp_only_after_the_gate_has_passed_there(
    released_project, monkeypatch, tmp_path
):
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    settings = yaml.safe_load((released_project / "graft.yaml").read_text())
    settings["serve"] = {"engine": ENGINE.model_dump(exclude_defaults=True), "port": 0, "threads": 1}
    (released_project / "graft.yaml").write_text(yaml.safe_dump(settings))
    project = open_project(released_project)
    release = project.release()

    answered: list[str] = []
    refused = pytest.raises(NegativeResult, match=f"{release.id[:12]} may not be served by llamacpp")
    with project.open() as work, refused as refusal:
        serve_here(work, project.settings.serve, on_ready=answered.append)
    assert "graft gate --engine llamacpp" in refusal.value.fix
    assert not answered

    verdict = project.gate_engine(release="champion")
    assert verdict.decision == "deploy"
    assert "llamacpp" in verdict.notes[0]
    # Another precision is another engine, which nobody has judged.
    other = ENGINE.model_copy(update={"precision": "q4_1"})
    with project.open() as work, pytest.raises(NegativeResult, match="q4_1"):
        require_engine_gate(work, release, project.settings.serve.model_copy(update={"engine": other}))

    with project.serving() as url:
        body = {
            "model": "champion",
            "messages": [{"role": "user", "content": "Where is the fern?"}],
            "max_tokens": 4,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert answer.headers["x-graft-release"] == release.id
            assert json.load(answer)["choices"][0]["message"]["content"]

    out = tmp_path / "ollama"
    done = CliRunner().invoke(
        app,
        ["release", "export", "--format", "ollama", "--to", str(out), "-C", str(released_project), "--json"],
    )
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    (file,) = out.glob("*.gguf")
    assert f"FROM ./{file.name}" in (out / "Modelfile").read_text()
    assert written["files"][file.name] == file_digest(file)
    server = LlamaServer(file, options=LlamaOptions(threads=1, context=256))
    assert server.tokenize("Where is the fern?")
    server.close()
    done = CliRunner().invoke(
        app,
        [
            "release",
            "export",
            "--format",
            "vllm",
            "--to",
            str(tmp_path / "vllm"),
            "-C",
            str(released_project),
        ],
    )
    assert done.exit_code == 0, done.output
    script = (tmp_path / "vllm" / "serve.sh").read_text()
    (adapter,) = (tmp_path / "vllm" / "adapters").iterdir()
    assert f"--lora-modules {adapter.name}=adapters/{adapter.name}" in script
    assert (tmp_path / "vllm" / "base" / "config.json").is_file()
    again = CliRunner().invoke(
        app, ["release", "export", "--format", "ollama", "--to", str(out), "-C", str(released_project)]
    )
    assert isinstance(again.exception, UserError)

    with project.open() as work:
        asked = EvaluationRequest(subjects=("champion", "engine:llamacpp/f32@champion"), limit=4)
        report = evaluate_asked(work, asked).report
    assert report.candidate.subject == "engine:llamacpp/f32@champion"
    assert report.candidate.generation.settings["engine"].startswith("llamacpp ")
    assert report.baseline.generation.settings["engine"] == "graftwork"
    assert report.candidate.generation.single_latency_seconds
