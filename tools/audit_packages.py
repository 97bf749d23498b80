"""Checks the installed packages: known vulnerabilities, and licences against a list.

    python tools/audit_packages.py [--licences]

In: the packages that `graftwork[all]` brings, as installed. Out: a table of their licences, and exit code
1 where one is not on the list or an advisory applies. Advisories come from PyPI through pip-audit; where
it is not installed or cannot reach its service, that is said and is an error of its own (3), not a pass.
"""

import argparse
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
ALLOWED = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public License|0BSD|Unlicense|HPND|"
    r"CNRI|LGPL|Zlib|Public Domain)\b",
    re.IGNORECASE,
)
NOT_SAID = {"rensa": "MIT"}
"""Packages whose metadata names no licence; as their repositories do."""


def locked_names() -> list[str]:
    """The packages of the lock file, and torch."""
    names = re.findall(r"^([a-zA-Z0-9_.-]+)==", LOCK.read_text(), flags=re.MULTILINE)
    return [*names, "torch"]


def find_licence(name: str) -> str | None:
    """What the installed package says of its licence; None where it is not installed."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    classifiers = [
        line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or [] if line.startswith("License")
    ]
    said = found.get("License-Expression") or ", ".join(classifiers) or found.get("License") or ""
    return said.strip().splitlines()[0][:80] if said.strip() else NOT_SAID.get(name.lower(), "")


def check_licences() -> list[str]:
    """Print the table; the packages whose licence is not allowed or not known."""
    refused = []
    for name in locked_names():
        licence = find_licence(name)
        if licence is None:
            continue  # for another platform
        print(f"{name:<24} {licence or 'unknown'}")
        if not ALLOWED.search(licence):
            refused.append(name)
    return refused


def check_advisories() -> int:
    """0: none applies; 1: some do; 3: it could not be found out for every locked package."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--local", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        print(f"advisories were not checked: {last[0][:200]}")
        print("fix: pip install pip-audit, on a machine that reaches PyPI")
        return 3
    found = [(one["name"], flaw["id"]) for one in packages for flaw in one.get("vulns", ())]
    for name, flaw in found:
        print(f"{name}: {flaw}")
    # What the service does not know it skips, and calls the rest clean: that is no answer.
    locked = set(locked_names())
    skipped = [one["name"] for one in packages if "vulns" not in one and one["name"] in locked]
    if skipped:
        print(f"advisories were not checked for {len(skipped)} packages, such as {', '.join(skipped[:5])}")
        print("fix: run this on a machine that reaches PyPI's advisories")
    if not found and not skipped:
        print("no known vulnerabilities")
    return 1 if found else 3 if skipped else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--licences", action="store_true", help="licences alone")
    arguments = parser.parse_args()
    refused = check_licences()
    if refused:
        print(f"not on the list of licences: {', '.join(refused)}")
    code = 0 if arguments.licences else check_advisories()
    return 1 if refused else code


if __name__ == "__main__":
    raise SystemExit(main())
