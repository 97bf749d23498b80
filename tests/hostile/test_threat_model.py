"""The threat model names a test for each promise: each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_threat_model_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    assert len(named) > 20
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    missing = [name for name in sorted(named) if not any(f"def {name}(" in source for source in sources)]
    assert not missing
