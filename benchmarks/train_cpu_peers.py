"""The peers of `train_cpu.py`: TRL's SFT trainer, and transformers + PEFT in a plain loop.

Both get the rows, the batches, the schedule and the first adapter weights of ours, so that what is
left to differ is how the step is done.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from graftwork.model.adapter_shape import AdapterShape
from graftwork.records.dataset import Row

Rate = Callable[[int], float]


def peft_model(base: Any, shape: AdapterShape, first: dict[str, torch.Tensor]) -> Any:
    """The same adapter in PEFT, beginning at the same numbers."""
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        lora_dropout=0.0,
        target_modules=list(shape.targets),
        layers_to_transform=list(shape.layers),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    named = {
        name.replace(".default.weight", ".weight"): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if named.keys() != first.keys():
        raise SystemExit("PEFT adapts other layers than we do: the comparison would mean nothing")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(first[name])
    return model


def make_optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)


class PlainLoop:
    """Padded batch, labels of -100 on the prompt, the model's own loss."""

    def __init__(self, model: Any, rate: Rate) -> None:
        self.model = model
        self._rate = rate
        self._optimizer = make_optimizer(model, rate(1))

    def step(self, number: int, rows: Sequence[Row]) -> None:
        width = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), width), 2)
        mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for place, row in enumerate(rows):
            length = len(row.tokens)
            tokens[place, :length] = torch.tensor(row.tokens)
            mask[place, :length] = 1
            labels[place, row.trained_from : length] = torch.tensor(row.tokens[row.trained_from :])
        self.model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate(number)
        self._optimizer.step()
        self._optimizer.zero_grad()


def train_with_trl(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    batches: Sequence[Sequence[int]],
    *,
    epochs: int,
    rate: Rate,
    folder: Path,
    after_step: Callable[[int, float, float], None],
) -> None:
    """TRL trains; after each of its steps `after_step` gets the seconds it took, wall and processor."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._wall, self._own = time.perf_counter(), time.process_time()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            after_step(state.global_step, time.perf_counter() - self._wall, time.process_time() - self._own)
            self._wall, self._own = time.perf_counter(), time.process_time()

    class Ordered(torch.utils.data.Sampler[int]):
        """Our batches in our order, one epoch a pass."""

        def __init__(self) -> None:
            self._epoch = 0

        def __len__(self) -> int:
            return len(rows)

        def __iter__(self) -> Iterator[int]:
            each = len(batches) // epochs
            begin = self._epoch * each
            self._epoch += 1
            return iter([at for batch in batches[begin : begin + each] for at in batch])

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return sampler

    sampler = Ordered()
    masks = [[0] * row.trained_from + [1] * (len(row.tokens) - row.trained_from) for row in rows]
    data = Dataset.from_dict({"input_ids": [list(row.tokens) for row in rows], "completion_mask": masks})
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(batches[0]),
        num_train_epochs=epochs,
        max_length=None,
        packing=False,
        completion_only_loss=True,
        # Recomputing is slower; there is memory enough here. TRL's own default is True.
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_grad_norm=1.0,
        weight_decay=0.0,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = make_optimizer(model, 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1))
    trainer = Trainer(
        model=model,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        callbacks=[Watch()],
    )
    trainer.train()
