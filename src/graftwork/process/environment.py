"""What every worker finds in its environment unless the user says otherwise."""

from pathlib import Path

WORKER_ENVIRONMENT = {
    # Threads that wait for each other spin for a moment and then sleep. Without a bound they burn
    # whole cores on a shared machine (the same generation took three times as long); without any
    # spinning training on a quiet one loses a tenth.
    "GOMP_SPINCOUNT": "30000",
    # What a card's allocator holds is then what it needs, and not what its fixed pieces leave over.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # What was compiled once is there for the next run and after the next start of the machine.
    "TORCHINDUCTOR_CACHE_DIR": str(Path.home() / ".cache" / "graftwork" / "compiled"),
}
