"""The rules on configurations made for them: each speaks where it should and is silent where it should."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.lint.configuration import (
    ConfigLocation,
    Configuration,
    LintContext,
    Peaks,
    count_steps,
    effective_batch,
)
from graftwork.plan.lint.project import RULES, lint
from graftwork.plan.lint.rules_learning import same_model
from graftwork.records.plan import ModelShape

SEVEN = ModelShape(
    name="seven", hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128, intermediate_size=11008,
    vocab_size=32256, tied_embeddings=False, max_positions=4096,
)  # fmt: skip
UNKNOWN = LintContext()
BIG = LintContext(shape=SEVEN, parameters=6_740_000_000)


def say(**values) -> Configuration:
    return Configuration.model_validate({"file": "c.yaml", "kind": "training", **values})


def rules_of(config: Configuration, context: LintContext | None = None) -> set[str]:
    return {finding.rule for finding in lint(config, context or LintContext())}


def on(name: str, **more) -> LintContext:
    return LintContext(gpu=find_gpu(name), **more)


def peaks(as_set: float, recomputed: float) -> Peaks:
    return Peaks(as_set=as_set, recomputed=recomputed, tokens=4096)


SPEAKS = [
    ("warmup-large-share", say(max_steps=100, warmup_steps=30), UNKNOWN),
    ("warmup-outlasts-run", say(rows=160, epochs=1, micro_batch=16, warmup_steps=10), UNKNOWN),
    ("both-halves", say(both_halves=True), UNKNOWN),
    ("batch-larger-than-data", say(rows=10, micro_batch=4, accumulation=4), UNKNOWN),
    ("max-steps-win", say(max_steps=100, epochs=3), UNKNOWN),
    ("saving-is-off", say(save_when="no"), UNKNOWN),
    ("evaluation-never-happens", say(max_steps=100, eval_when="steps", eval_steps=500), UNKNOWN),
    ("evaluation-not-switched-on", say(eval_steps=50), UNKNOWN),
    ("stop-without-metric", say(stops_early=True, eval_when="steps", eval_steps=10), UNKNOWN),
    ("best-without-evaluation", say(keep_best=True), UNKNOWN),
    ("best-off-the-grid", say(keep_best=True, save_when="epoch", eval_when="steps", eval_steps=5), UNKNOWN),
    ("batch-does-not-divide", say(kind="graft", batch=7, gpus=2), UNKNOWN),
    ("batch-contradicts-itself", say(kind="deepspeed", batch=10, micro_batch=4, accumulation=2), UNKNOWN),
    ("weights-do-not-fit", say(method="lora", precision="float32"), on("RTX 4090", parameters=7_000_000_000)),
    ("weights-do-not-fit", say(method="lora", weights_dtype="float32", ram_gib=16),
     LintContext(on_cpu=True, parameters=7_000_000_000)),
    ("recomputing-is-off", say(max_length=4096), on("RTX 4090", peaks=peaks(40, 9))),
    ("peak-does-not-fit", say(max_length=4096), on("RTX 4090", peaks=peaks(80, 30))),
    ("fp16-products", say(bits=4, compute_dtype="float16"), on("RTX 4090")),
    ("two-half-precisions", say(bits=4, compute_dtype="float16", precision="bfloat16"), UNKNOWN),
    ("float32-products", say(bits=4), UNKNOWN),
    ("8bit-optimizer-on-cpu", say(optimizer="paged_adamw_8bit"), LintContext(on_cpu=True)),
    ("fp16-on-cpu", say(precision="float16"), LintContext(on_cpu=True)),
    ("rate-out-of-range", say(method="full", learning_rate=2e-4), BIG),
    ("rate-out-of-range", say(method="lora", learning_rate=1e-5), BIG),
    ("scale-is-odd", say(method="lora", rank=64, alpha=1024), BIG),
    ("rows-are-cut", say(max_length=100), LintContext(lengths=(50, 60, 150))),
    ("length-beyond-model", say(max_length=8192), BIG),
    ("another-is-deployed", say(model="a/one-7b", deployed_model="a/one-7b-instruct"), UNKNOWN),
    ("spot-without-checkpoints", say(spot=True, save_steps=500, max_steps=100), UNKNOWN),
    ("deadline-comes-first", say(deadline_minutes=240, expected_minutes=700), UNKNOWN),
    ("number-as-text", say(texts_for_numbers={"lr": "2e-4"}), UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "config", "context"), SPEAKS, ids=[row[0] for row in SPEAKS])
def test_a_rule_speaks_where_it_should(rule, config, context):
    assert rule in rules_of(config, context)


SILENT = [
    ("max-steps-win", say(max_steps=10, rows=40, micro_batch=4, epochs=1), UNKNOWN),
    ("batch-larger-than-data", say(rows=16, micro_batch=4, accumulation=4), UNKNOWN),
    ("warmup-large-share", say(max_steps=1000, warmup_steps=50), UNKNOWN),
    ("warmup-outlasts-run", say(warmup_steps=50), UNKNOWN),
    ("checkpoint-never-comes", say(max_steps=100, save_when="epoch", save_steps=500), UNKNOWN),
    ("best-off-the-grid", say(keep_best=True, save_steps=100, eval_when="steps", eval_steps=50), UNKNOWN),
    ("stop-without-metric", say(stops_early=True, eval_when="epoch", best_metric="eval_loss"), UNKNOWN),
    ("batch-contradicts-itself", say(kind="deepspeed", batch=32, micro_batch=4, accumulation=2), UNKNOWN),
    ("weights-do-not-fit", say(method="qlora", bits=4), on("RTX 4090", parameters=7_000_000_000)),
    ("full-does-not-fit",
     say(method="full", precision="bfloat16", zero_stage=3, offload_optimizer=True, offload_weights=True),
     on("RTX 5060 Ti", parameters=6_740_000_000)),
    ("fp16-products", say(bits=4, compute_dtype="float16"), on("T4")),
    ("packing-mixes-rows", say(packing=True, document_masks=True), UNKNOWN),
    ("rate-out-of-range", say(method="lora", learning_rate=2e-4), BIG),
    ("scale-is-odd", say(method="lora", rank=64, alpha=16), BIG),
    ("scale-is-odd", say(method="lora", rank=256, alpha=16, use_rslora=True), BIG),
    ("rows-are-cut", say(max_length=200), LintContext(lengths=(50, 60, 150))),
    ("spot-without-mirror", say(spot=True, mirror="s3://bucket"), UNKNOWN),
    ("rate-cannot-be-proven", say(target_rate=0.95, test_rows=126), UNKNOWN),
    ("another-is-deployed", say(model="Qwen/Qwen3_8B", deployed_model="qwen3-8b"), UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "config", "context"), SILENT, ids=[row[0] for row in SILENT])
def test_a_rule_is_silent_where_all_is_well(rule, config, context):
    assert rule not in rules_of(config, context)


def test_nothing_said_is_nothing_found():
    assert lint(say(), UNKNOWN) == ()


def test_every_rule_has_its_own_name():
    assert len({rule.id for rule in RULES}) == len(RULES)


def test_a_finding_points_at_the_key_and_not_only_at_the_file():
    config = say(
        save_when="no", places={"save_when": ConfigLocation(key="checkpointing.save_strategy", line=7)}
    )
    (found,) = lint(config, UNKNOWN)
    assert (found.where, found.key) == ("c.yaml:7", "checkpointing.save_strategy")


def test_a_value_from_the_command_line_is_shown_as_its_option():
    config = say(precision="bfloat16", places={"gpu": ConfigLocation(key="--gpu")})
    assert (
        next(finding for finding in lint(config, on("T4")) if finding.rule == "bf16-missing").where == "--gpu"
    )


def test_rows_lost_are_reported_as_shares_of_rows_and_tokens():
    found = next(
        finding for finding in lint(say(max_length=100), LintContext(lengths=(100, 100, 100, 200))) if finding
    )
    assert found.what.startswith("25.0% of the rows")
    assert found.why.startswith("20.0% of all tokens")


def test_a_base_and_its_instruct_version_are_two_models():
    assert not same_model("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct")


@given(
    rows=st.integers(1, 5000), micro=st.integers(1, 16), times=st.integers(1, 32), cards=st.integers(1, 8),
    epochs=st.integers(1, 5),
)  # fmt: skip
def test_steps_cover_all_rows_and_no_more_than_one_smaller_batch(rows, micro, times, cards, epochs):
    config = say(rows=rows, micro_batch=micro, accumulation=times, gpus=cards, epochs=epochs)
    steps, batch = count_steps(config), effective_batch(config)
    assert steps is not None
    assert steps.epoch is not None
    assert steps.epoch * batch >= rows
    assert (steps.epoch - 1) * batch < rows
    assert steps.total == steps.epoch * epochs


@given(steps=st.integers(2, 2000), warmup=st.integers(0, 3000))
def test_a_warm_up_is_called_too_long_by_exactly_one_rule_or_none(steps, warmup):
    found = rules_of(say(max_steps=steps, warmup_steps=warmup)) & {
        "warmup-outlasts-run",
        "warmup-large-share",
    }
    expected = warmup > 0.2 * steps
    assert len(found) == expected
    if warmup >= steps:
        assert found == {"warmup-outlasts-run"}


@given(cards=st.integers(1, 8), stage=st.sampled_from([None, 1, 2, 3]))
def test_more_cards_or_a_higher_stage_never_need_more_of_a_card(cards, stage):
    from graftwork.plan.lint.rules_device import full_floor

    def floor(cards, stage):
        config = say(method="full", precision="bfloat16", gpus=cards, zero_stage=stage or 1)
        found = full_floor(config, BIG)
        assert found is not None
        return found[0]

    assert floor(cards + 1, stage) <= floor(cards, stage)
    if stage and stage < 3:
        assert floor(cards, stage + 1) <= floor(cards, stage)
