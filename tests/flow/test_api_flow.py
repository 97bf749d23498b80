"""The public API: docs/api.md runs as written, exports stay what they are, records render in notebooks."""

import re
from pathlib import Path

import graftwork
from graftwork.records.dataset import Audit, Finding, LengthSummary

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
EXPORTED = [
    "Audit",
    "EnvironmentFailure",
    "Evaluated",
    "Figure",
    "FitAnswer",
    "GraftError",
    "NegativeResult",
    "NullReporter",
    "Plan",
    "PreparedData",
    "Project",
    "Release",
    "ReleaseEntry",
    "Report",
    "Reporter",
    "RunPlan",
    "Stale",
    "TrainOutcome",
    "UserError",
    "Verdict",
    "__version__",
    "audit_files",
    "check_spec",
    "generate_components",
    "init_project",
    "list_models",
    "open_project",
    "plan_fit",
    "pull_model",
    "remove_model",
    "verify_generated",
]


def make_audit(title: str) -> Audit:
    length = LengthSummary(smallest=1, median=1, p95=1, largest=1)
    finding = Finding(code="secret", severity="blocker", count=3, title=title, effect="", fix="redact it")
    return Audit(
        files=("log.jsonl",),
        rows=4,
        readable=4,
        usable=1,
        fit_to_train=False,
        findings=(finding,),
        groups={},
        prompt_length=length,
        reply_length=length,
    )


def test_graftwork_exports_exactly_the_documented_names():
    assert sorted(graftwork.__all__) == EXPORTED


def test_every_exported_name_can_be_imported():
    for name in graftwork.__all__:
        assert getattr(graftwork, name) is not None
    assert set(EXPORTED) <= set(dir(graftwork))


def test_api_page_names_every_exported_record():
    page = PAGE.read_text()
    missing = [
        name for name in EXPORTED if f"{name}" not in page and name not in {"EnvironmentFailure", "Figure"}
    ]
    assert missing == ["Project", "UserError", "__version__"]


def test_a_record_renders_as_escaped_html():
    assert graftwork.Project is not None  # importing it registers the renderer
    html = make_audit("<script>alert(1)</script>")._repr_html_()
    assert html is not None
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>" not in html
    assert "<td" in html
    assert "redact it" in html


def test_every_block_of_the_api_page_runs(small_project, change_settings, monkeypatch, capsys):
    # Progress is looked for four times a second: a fast machine would be through between two looks.
    change_settings(small_project, train={"epochs": 12})
    monkeypatch.chdir(small_project.parent)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) > 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    output = capsys.readouterr().out
    assert "started train" in output
    assert re.search(r"training: \d+ of \d+, loss", output)
    assert "deploy" in output
    assert isinstance(names["release"], graftwork.Release)
    assert "Project small" in names["project"]._repr_html_()
