"""What every worker finds in its environment unless the user says otherwise."""

WORKER_ENVIRONMENT = {
    # Threads that wait for each other spin for a moment and then sleep. Without a bound they burn
    # whole cores on a shared machine (the same generation took three times as long); without any
    # spinning training on a quiet one loses a tenth.
    "GOMP_SPINCOUNT": "30000",
}
