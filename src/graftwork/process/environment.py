"""What every worker finds in its environment unless the user says otherwise."""

from pathlib import Path

WORKER_ENVIRONMENT = {
    # Threads that wait for each other spin for a moment and then sleep. Without a bound they burn
    # whole cores on a shared machine (the same generation took three times as long); without any
    # spinning training on a quiet one takes half as long again. Beside a busy neighbour even this is
    # too long: `graftwork.model.threads` shortens it while threads wait for a core.
    "GOMP_SPINCOUNT": "30000",
    # What a card's allocator holds is then what it needs, and not what its fixed pieces leave over.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def compiled_cache() -> dict[str, str]:
    """What was compiled once is there for the next run; nothing where no such folder can be had."""
    try:
        folder = Path.home() / ".cache" / "graftwork" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
