"""`graft status` says what idle replicas cost."""

import json

from graftwork.cli.run import describe_autoscale
from graftwork.pipeline.status import _read_health

HEALTH = {
    "status": "ok",
    "engine": {"reason": ""},
    "autoscale": {
        "replicas": 2,
        "min": 1,
        "max": 3,
        "started": 1,
        "stopped": 0,
        "replica_seconds": 400.0,
        "idle_seconds": 100.0,
        "idle_now": 1,
        "idle_memory_gib": 0.93,
        "idle_usd": 0.25,
    },
}


def test_the_status_of_an_endpoint_has_the_cost_of_idle_replicas():
    found = _read_health("http://127.0.0.1:8080", json.dumps(HEALTH).encode())
    assert found.autoscale is not None
    text = describe_autoscale(found.autoscale)
    assert text == (
        "autoscale: 2 replicas (1 to 3), 1 idle now with 0.93 GiB; idle for 1 min 40 s so far (25% of all "
        "replicas' time, $0.25)"
    )


def test_an_endpoint_with_a_fixed_number_of_replicas_shows_none():
    found = _read_health("http://127.0.0.1:8080", json.dumps({"status": "ok"}).encode())
    assert found.autoscale is None
