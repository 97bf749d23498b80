"""Fetches the scripts that the web page ships, and checks them.

    python tools/vendor_web.py

In: versions and integrity hashes in `vendored.json`, npm. Out: the files in
`src/graftwork/web/static/vendor`, with their licences. A package whose hash differs is refused.
"""

import base64
import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "src" / "graftwork" / "web" / "static" / "vendor"
MANIFEST = VENDOR / "vendored.json"


def main() -> None:
    listed = json.loads(MANIFEST.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        for package in listed["packages"]:
            archive = fetch(f"{package['name']}@{package['version']}", package["integrity"], Path(scratch))
            with tarfile.open(archive) as packed:
                for inside, name in package["files"].items():
                    member = packed.extractfile(f"package/{inside}")
                    assert member is not None, inside
                    content = member.read()
                    (VENDOR / name).write_bytes(content)
                    listed["sha256"][name] = hashlib.sha256(content).hexdigest()
    MANIFEST.write_text(json.dumps(listed, indent=2) + "\n")


def fetch(name: str, integrity: str, folder: Path) -> Path:
    """The archive of a package, whose hash must be the listed one."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", name], cwd=folder, check=True, capture_output=True, text=True
    )
    archive = folder / packed.stdout.split()[-1]
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != integrity:
        raise SystemExit(f"{name} has the hash {found}, expected {integrity}")
    return archive


if __name__ == "__main__":
    main()
