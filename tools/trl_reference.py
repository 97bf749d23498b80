"""Write losses and gradients of TRL's own trainers to tests/data/trl_reference.json.

In: the model and the batches of tests/trl_batch.py. Needs TRL, which is no dependency of the product: `make
test-trl` installs it apart.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "data" / "trl_reference.json"
sys.path.insert(0, str(ROOT / "tests"))

from trl_batch import (  # noqa: E402
    ADVANTAGES,
    ANSWERS,
    GRADIENT_OF,
    JUDGED,
    KTO_CASES,
    MAX_TOKENS,
    PAIRS,
    POLICY_CASES,
    PREFERENCE_CASES,
    PROMPTS,
    VOCABULARY,
    make_model,
    shift,
)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3"
    )


def pad(rows: list[tuple[int, ...]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    values, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for place, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        values[place, span] = torch.tensor(row)
        mask[place, span] = 1
    return values, mask


def make_policy_trainer() -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=MAX_TOKENS,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    return GRPOTrainer(
        model=make_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["t5 t9", "t6 t9"]}),
        processing_class=make_tokenizer(),
    )


def policy_case(trainer: Any, case: dict[str, Any]) -> dict[str, Any]:
    prompts, prompt_mask = pad([PROMPTS[at // 3] for at in range(6)], left=True)
    answers, answer_mask = pad(list(ANSWERS), left=False)
    trainer.loss_type = case["loss_type"]
    trainer.beta = case.get("beta", 0.0)
    trainer.epsilon_low, trainer.epsilon_high = 0.2, case.get("epsilon_high", 0.2)
    trainer.importance_sampling_level = case.get("level", "token")
    trainer.current_gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    model = trainer.model.eval()
    model.zero_grad()
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": answers,
        "completion_mask": answer_mask,
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": answer_mask.sum(),
    }
    with torch.no_grad():
        now, *_ = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([prompts, answers], 1),
            torch.cat([prompt_mask, answer_mask], 1),
            answers.shape[1],
        )
    rows = [shift(at, size=answers.shape[1], by=1.0) for at in range(6)]
    if case.get("old"):
        inputs["old_per_token_logps"] = now + 0.4 * torch.stack(rows)
    inputs["ref_per_token_logps"] = now - 0.2 * torch.stack(rows)
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": gradient_of(model)}


def gradient_of(model: Any) -> list[float]:
    return [round(value, 9) for value in model.get_parameter(GRADIENT_OF).grad.flatten().tolist()]


def preference_case(case: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(PAIRS),
        beta=case["beta"],
        loss_type=case["types"],
        loss_weights=case["weights"],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    rows = Dataset.from_dict({"prompt": ["t5"], "chosen": ["t6"], "rejected": ["t7"]})
    trainer = DPOTrainer(
        model=make_model(),
        ref_model=make_model(),
        args=args,
        train_dataset=rows,
        processing_class=make_tokenizer(),
    )
    sequences = [PROMPTS[p] + ANSWERS[c] for p, c, _ in PAIRS] + [
        PROMPTS[p] + ANSWERS[r] for p, _, r in PAIRS
    ]
    lengths = [len(PROMPTS[p]) for p, _, _ in PAIRS] * 2
    ids, mask = pad(sequences, left=False)
    replies = mask.clone()
    for place, length in enumerate(lengths):
        replies[place, :length] = 0
    model = trainer.model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    own = (logits.gather(2, ids[:, 1:, None])[..., 0] * replies[:, 1:]).sum(1)
    moved = own + torch.stack([shift(at, size=1, by=0.7)[0] for at in range(len(own))])
    trainer.precompute_ref_logps = True
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "completion_mask": replies,
        "ref_chosen_logps": moved[: len(PAIRS)],
        "ref_rejected_logps": moved[len(PAIRS) :],
    }
    model.zero_grad()
    loss = trainer._compute_loss(model, inputs, False)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": gradient_of(model)}


def kto_case(case: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = KTOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(JUDGED),
        beta=case["beta"],
        desirable_weight=case["desirable"],
        undesirable_weight=case["undesirable"],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
    )
    given = {"prompt": ["t5", "t5"], "completion": ["t6", "t7"], "label": [True, False]}
    trainer = KTOTrainer(
        model=make_model(),
        ref_model=make_model(),
        args=args,
        train_dataset=Dataset.from_dict(given),
        processing_class=make_tokenizer(),
    )
    answers = [answer for _, answer, _ in JUDGED]
    model = trainer.model.eval()
    inputs: dict[str, Any] = {"label": [is_good for _, _, is_good in JUDGED]}
    inputs["label"] = torch.tensor(inputs["label"])
    for prefix, chosen in (("", answers), ("KL_", [answers[-1], *answers[:-1]])):
        rows = [PROMPTS[prompt] + ANSWERS[at] for (prompt, _, _), at in zip(JUDGED, chosen, strict=True)]
        ids, mask = pad(rows, left=False)
        replies = mask.clone()
        for place, (prompt, _, _) in enumerate(JUDGED):
            replies[place, : len(PROMPTS[prompt])] = 0
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        own = (logits.gather(2, ids[:, 1:, None])[..., 0] * replies[:, 1:]).sum(1)
        moved = own + torch.stack([shift(at, size=1, by=0.7)[0] for at in range(len(own))])
        inputs |= {
            f"{prefix}input_ids": ids,
            f"{prefix}attention_mask": mask,
            f"{prefix}completion_mask": replies,
            f"ref_{prefix}logps": moved if not prefix else own + case["start"],
        }
    trainer.precompute_ref_logps = True
    model.zero_grad()
    loss = trainer._compute_loss(model, inputs, False)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": gradient_of(model)}


def odds_case() -> dict[str, Any]:
    """The odds ratio loss of TRL's ORPO, by the mean log-probabilities of two pairs."""
    from types import SimpleNamespace

    from trl.experimental.orpo import ORPOTrainer

    chosen = torch.tensor([-0.4, -1.2], requires_grad=True)
    rejected = torch.tensor([-0.9, -0.3], requires_grad=True)
    holder = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    losses = ORPOTrainer.odds_ratio_loss(holder, chosen, rejected)[0]
    (-losses.mean()).backward()
    return {
        "loss": float(-losses.detach().mean()),
        "chosen": chosen.grad.tolist(),
        "rejected": rejected.grad.tolist(),
    }


def main() -> int:
    import trl

    torch.manual_seed(0)
    trainer = make_policy_trainer()
    found = {
        "trl": trl.__version__,
        "policy": {name: policy_case(trainer, case) for name, case in POLICY_CASES.items()},
        "preference": {name: preference_case(case) for name, case in PREFERENCE_CASES.items()},
        "kto": {name: kto_case(case) for name, case in KTO_CASES.items()},
        "odds": odds_case(),
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
