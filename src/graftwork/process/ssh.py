"""The SSH client of this machine. GRAFT_SSH replaces the command `ssh`: `ssh -p 2222 -i key`."""

import os
import shlex

COMMAND = "GRAFT_SSH"
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
UNREACHED = 255
"""The exit code of ssh itself."""


def ssh_command(*options: str) -> list[str]:
    """The client with options that never ask a person; the host and the command follow."""
    return [*(shlex.split(os.environ.get(COMMAND, "")) or ["ssh"]), *OPTIONS, *options, "--"]
