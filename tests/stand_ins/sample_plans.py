"""A plan, a tuning, a step and an outcome as small as they can be."""

from graftwork.records.base import Figure
from graftwork.records.plan import DeviceFacts, Plan, Tuning
from graftwork.records.run import TrainOutcome, TrainStep


def make_plan(**changes) -> Plan:
    plan = Plan(
        base="small",
        base_fingerprint="b",
        dataset_hash="d",
        method="lora",
        dtype="float32",
        device=DeviceFacts(kind="cpu", name="processor", memory_gib=8, threads=2),
        certainty="computed",
        total_parameters=Figure.exact(1000),
        trainable_parameters=Figure.exact(100),
        peak_memory_gib=Figure.about(2, down=0.8, up=1.2, unit="GiB"),
        disk_gib=Figure.exact(0.1, "GiB"),
        tokens=Figure.exact(36_000),
        trained_tokens=Figure.exact(9_000),
        steps=Figure.exact(10),
        tokens_per_second=Figure.about(100, down=0.7, up=1.3, unit="tokens/s"),
        minutes=Figure.about(6.5, down=0.7, up=1.3, unit="min"),
        fits=True,
        train={},
    )
    return plan.model_copy(update=changes)


def make_outcome(**changes) -> TrainOutcome:
    outcome = TrainOutcome(
        run_id="run",
        adapter_folder="adapter",
        adapter_hash="a",
        base_hash_before="b",
        base_hash_after="b",
        steps=10,
        epochs=1.0,
        first_loss=2.0,
        final_loss=1.0,
        validation_loss_before=2.0,
        validation_loss_after=1.0,
        seconds=360.0,
        load_seconds=6.0,
        tokens_per_second=100.0,
        peak_memory_gib=2.0,
        trainable_parameters=100,
        restarts=0,
        replayed_steps=0,
        replay_identical=None,
    )
    return outcome.model_copy(update=changes)


def make_step(number: int, **changes) -> TrainStep:
    figures = {"loss": 1.0, "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens": 10, "trained_tokens": 5}
    return TrainStep(**{"step": number, "seconds": 0.5, **figures, **changes})


def make_tuning(**changes) -> Tuning:
    form = {"form": "whole", "head": "whole", "turned": False, "host_embedding": False}
    tokens = {"micro_tokens": 64, "longest": 32, "chunk_tokens": 24, "head_tokens": 16}
    figures = {"limit_gib": 1.0, "peak_gib": 0.0, "seconds_per_token": 0.0}
    return Tuning(**{**form, **tokens, **figures, "keep": 3, "lean": 0, **changes})
