"""An answer made surer by a trace: the chosen step is built without weights and followed tensor by tensor.

In: an answer and the model's sizes. Out: the answer again, with memory as the trace found it. The tracer is a
child process, because it needs torch, transformers and PEFT; our own step on a card has no trace.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit
from graftwork.plan.fit.peaks import exact_peak
from graftwork.plan.fit.setups import plain_setup
from graftwork.plan.fit.sharding import passing_setup
from graftwork.plan.timing.rates import Rates
from graftwork.process.environment import WORKER_ENVIRONMENT
from graftwork.records.errors import EnvironmentLacks, pip_install
from graftwork.records.fit import FitAnswer, PlainSetup
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB

TRACER = "graftwork.model.trace"
PATIENCE_SECONDS = 600.0
NOTHING_TO_TRACE = (
    "nothing was traced: graft's own step is counted tensor by tensor already; `graft plan probe` measures it"
)


def correct(answer: FitAnswer, model: CatalogModel, *, rates: Rates | None) -> FitAnswer:
    """The answer with the trace's peak in place of the computed one."""
    strategy, question = answer.strategy, answer.question
    if strategy.tuning is not None or question.machine.gpu is None:
        return answer.model_copy(update={"reasons": (*answer.reasons, NOTHING_TO_TRACE)})
    setup = plain_setup(
        question,
        sharding=strategy.sharding,
        rows=strategy.micro_rows,
        tokens=max(question.lengths),
        checkpointed=strategy.checkpointed_layers,
    )
    if question.method == "full" and strategy.sharding not in ("none", "ddp"):
        setup = passing_setup(setup)
    traced = trace(config_of(model), setup)
    computed = exact_peak(question.shape, setup, architecture=question.architecture)
    surer = fit(question, rates=rates, correction=traced / computed.allocated, level="traced")
    off = 100 * (computed.allocated / traced - 1)
    said = f"traced {traced / GIB:.2f} GiB allocated on one card alone; computed before: {off:+.1f} %"
    return surer.model_copy(update={"reasons": (said, *surer.reasons)})


def trace(config: dict[str, Any], setup: PlainSetup) -> float:
    """Bytes allocated at the peak, as the tracer found them."""
    asked = json.dumps({"config": config, "setup": setup.model_dump(mode="json")})
    done = subprocess.run(
        [sys.executable, "-m", TRACER, asked],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env=_environment(),
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    said: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if done.returncode or "peak" not in said:
        complaint = said.get("what") or (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EnvironmentLacks(
            "the step could not be traced",
            why=str(complaint),
            fix="leave --trace out: computed figures need neither; or pip install peft and "
            + pip_install("train"),
            where="--trace",
        )
    return float(said["peak"]["allocated"])


def _environment() -> dict[str, str]:
    return {**os.environ, **WORKER_ENVIRONMENT}


def config_of(model: CatalogModel) -> dict[str, Any]:
    """The model's own config.json where it is at hand, else one of its sizes."""
    file = Path(model.source)
    if file.name.endswith(".json") and file.is_file():
        own: dict[str, Any] = json.loads(file.read_text())
        return own
    return shape_config(model.shape, architecture=model.architecture)


def shape_config(shape: ModelShape, *, architecture: str) -> dict[str, Any]:
    return {
        "model_type": architecture,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "max_position_embeddings": shape.max_positions,
    }
