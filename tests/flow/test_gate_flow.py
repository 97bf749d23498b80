"""The gate as a pipeline sees it: exit codes, JSON, a JUnit file, changed rules, the next session."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import yaml
from flows import opened

from graftwork.evaluate.commands import gate_all, judge_session
from graftwork.evaluate.gate.project import RULES
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.files.disk import Journal
from graftwork.views.evaluation import write_junit


def write(folder, **parts):
    settings = yaml.safe_load((folder / "graft.yaml").read_text())
    settings.update(parts)
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def graft(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.cli.main", *words, "-C", str(folder), "--json"],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_two_models_are_judged_together_and_changed_rules_are_noted(small_project):
    small = {"rank": 2, "epochs": 1, "batch_size": 4, "checkpoint_every": 4, "threads": 1, "max_rows": 16}
    write(
        small_project,
        train={**small, "validation_rows": 4},
        # Two adapters are judged together: the bound of each needs more timings.
        evaluate={"max_new_tokens": 4, "latency_cases": 8},
        models={"main": {}, "special": {"train": {"start_from": "main", "learning_rate": 1e-3}}},
    )
    junit = small_project / "out" / "gate.xml"

    with opened(small_project) as work:
        gated = gate_all(work)

    assert gated.exit_code == 0
    assert {name: one.decision for name, one in gated.verdicts.items()} == {
        "main": "deploy",
        "special": "deploy",
    }
    junit.parent.mkdir()
    junit.write_text(write_junit(gated.verdicts))
    suites = ElementTree.parse(junit).getroot()
    assert [suite.get("name") for suite in suites] == ["graft gate main", "graft gate special"]
    assert suites.get("failures") == "0"
    first = GateSettings.model_validate({"rules": [{"metric": "latency_seconds", "under": 1000.0}]})
    notes = [Journal(path).read() for path in (small_project / ".graft" / "runs").glob(f"*/{RULES}")]
    assert [[line["rules_hash"] for line in note] for note in notes] == [[first.rules_hash()]] * 2

    # A tiny model writes no JSON: the rule is broken, and it was not there when the run was judged first.
    invariant = {"metric": "json_valid", "over": 0.9, "severity": "invariant"}
    write(small_project, gate={"rules": [invariant], "primary": "none"})
    code, verdict = graft(small_project, "gate", "--junit", str(junit))
    assert (code, verdict["decision"]) == (11, "abort")
    assert "rules were changed after this run" in verdict["notes"][0]
    assert "now invariant: JSON-valid rate over 90 %" in verdict["notes"][0]
    assert "the verdict would be: deploy" in verdict["notes"][0]
    assert verdict["rules_hash"] != first.rules_hash()
    assert ElementTree.parse(junit).getroot().get("failures") == "1"

    # The specialist's session began at the main model's adapter, which was judged above.
    with opened(small_project, model="special") as work:
        found = judge_session(work)
    assert found.start in ("this", "before")
    assert Path(found.adapter_folder).is_dir()
    assert [rule.metric for rule in found.rules] == ["json_valid"]
