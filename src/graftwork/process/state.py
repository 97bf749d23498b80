"""In which state the system has a process: running, sleeping, stopped, waiting for a disk."""

from pathlib import Path


def process_state(pid: int) -> str:
    """The letter that Linux gives (R, S, D, T, Z); empty where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name before it stands in brackets and may hold anything.
    return text.rpartition(")")[2].split()[0]
