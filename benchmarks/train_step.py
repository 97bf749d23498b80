"""Our training step on a processor against transformers + PEFT on the same rows, batches and adapter.

Run: python benchmarks/train_step.py, after `graft data prepare -C examples/cited_answers`. Steps are
interleaved in one run; the figure is the median of rows' tokens a second.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from graftwork.files.dataset_folder import read_rows
from graftwork.model.adapter import AdapterShape, attach
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.load import load_base, use_threads
from graftwork.records.dataset import Row
from graftwork.train.engine import Engine
from graftwork.train.loop import Loop
from graftwork.train.order import plan_batches
from graftwork.train.settings import ALL_LINEARS, TrainSettings

DATASETS = Path(__file__).parents[1] / "examples" / "cited_answers" / ".graft" / "datasets"
ROWS, BATCH, LAYERS = 48, 8, tuple(range(15, 30))


def peer_step(model: Any, optimizer: torch.optim.Optimizer, rows: list[Row]) -> None:
    """Padded batch, labels of -100 on the prompt, the model's own loss."""
    width = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), width), 2)
    mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for place, row in enumerate(rows):
        length = len(row.tokens)
        tokens[place, :length] = torch.tensor(row.tokens)
        mask[place, :length] = 1
        labels[place, row.trained_from : length] = torch.tensor(row.tokens[row.trained_from :])
    model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    folder = next(iter(DATASETS.glob("[0-9a-f]*")), None)
    if folder is None:
        sys.exit("no dataset: run `graft data prepare -C examples/cited_answers` first")
    rows = read_rows(folder, "train")[:ROWS]
    base = Path(find_base(EMBEDDED, project_folder=Path()).folder)
    use_threads(None)
    settings = TrainSettings(rank=16, alpha=32, epochs=1, batch_rows=BATCH)
    config = LoraConfig(
        r=16, lora_alpha=32, target_modules=list(ALL_LINEARS), layers_to_transform=list(LAYERS)
    )
    peer = get_peft_model(load_base(base), config)
    optimizer = torch.optim.AdamW(p for p in peer.parameters() if p.requires_grad)
    batches = plan_batches(tuple(len(r.tokens) for r in rows), batch_rows=BATCH, epochs=1, seed=settings.seed)
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        shape = AdapterShape(rank=16, alpha=32, targets=ALL_LINEARS, layers=LAYERS)
        model = load_base(base)
        engine = Engine(model, attach(model, shape, seed=settings.seed), settings=settings)
        loop = Loop(engine, rows, settings=settings, folder=Path(scratch))
        for number, batch in enumerate(batches, 1):
            step = loop._step(number)
            ours.append(step.tokens / step.seconds)
            begun = time.perf_counter()
            peer_step(peer, optimizer, [rows[at] for at in batch])
            theirs.append(step.tokens / (time.perf_counter() - begun))
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{ROWS} rows, batches of {BATCH}, LoRA r = 16 on the upper {len(LAYERS)} layers, fp32")
    print(f"graftwork            {mine:6.0f} tokens/s")
    print(f"transformers + PEFT  {other:6.0f} tokens/s   ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
