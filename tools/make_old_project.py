"""Makes tests/data/old_project.tar.xz: a small project as an old commit leaves it.

    python tools/make_old_project.py COMMIT [--to FILE]

The project is made in /tmp/graft-old-project, so that no other path of the machine gets into it. Its main
model went through `graft run`, was released, served and captured; the training of its second model was
stopped after a checkpoint. `expected/` holds what the old commit answers and the adapter that its
uninterrupted training gives. tests/flow/test_old_project.py reads all of it with the current code.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from compare import Checkout, check_out, describe_machine, hash_tensors, resolve_commit

TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "old_project.tar.xz"
HOME = Path("/tmp/graft-old-project")
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLANTS = ("fern", "moss", "ivy", "lotus", "maple", "willow", "cedar", "thyme", "sage", "basil")
PLACES = ("pond", "gate", "wall", "court", "terrace", "orchard", "glasshouse", "meadow")
STOPPED_IN_ORDER = 75
QUESTION = "Where is the fern?"
SETTINGS: dict[str, Any] = {
    "project": "old-project",
    "base": "model",
    "data": {"logs": ["logs/*.jsonl"], "test": 0.3, "validation": 0.1, "question_similarity": 0.95},
    "models": {
        "main": {},
        "second": {"train": {"epochs": 60, "checkpoint_every": 5, "learning_rate": 1.0e-3}},
    },
    "train": {
        "rank": 2,
        "epochs": 6,
        "learning_rate": 3.0e-2,  # So much that the champion answers differently from its base.
        "batch_rows": 4,
        "checkpoint_every": 4,
        "precision": "float32",
        "threads": 1,
    },
    "evaluate": {"max_new_tokens": 4, "latency_cases": 6},
    "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}], "primary": "none"},
    "serve": {"port": 0},
}
LEFT_OUT = (
    "*.html",
    "lock",
    "*.lock",
    "*.log",
    "__pycache__",
    "heartbeat.json",
    "vitals.jsonl",
    "cpu_bench*",
)


def write_base(folder: Path) -> None:
    """A random two-layer Llama whose tokens are bytes."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "bos_token": CONTROL[1],
        "eos_token": CONTROL[2],
        "pad_token": CONTROL[2],
        "unk_token": CONTROL[0],
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}, indent=1)
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=256 + len(CONTROL),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=258,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_log(path: Path, rows: int = 60) -> None:
    chance = random.Random(5)
    lines = []
    for number in range(rows):
        plant, place = chance.choice(PLANTS), chance.choice(PLACES)
        question = f"[1] The {plant} is by the {place} since 19{number:02d}.\nWhere is {plant} {number}?"
        reply = json.dumps({"answer": f"By the {place}.", "citations": [1], "refused": False})
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        lines.append(json.dumps({"id": str(number), "status": "success", "messages": messages}))
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([*lines, "this is no JSON"]) + "\n")


def answer_of(checkout: Checkout, arguments: list[str], *, passing: tuple[int, ...] = (0,)) -> Any:
    """The JSON document that `graft ARGUMENTS --json` prints in the project."""
    environment = {**checkout.environment(), "USER": "maker", "LOGNAME": "maker", "HOSTNAME": "machine"}
    done = subprocess.run(
        [*checkout.command(arguments), "--json"], cwd=HOME, env=environment, capture_output=True, check=False
    )
    if done.returncode not in passing:
        raise SystemExit(f"graft {' '.join(arguments)}: {done.returncode}\n{done.stderr.decode()}")
    return json.loads(done.stdout)


def interrupt_training(checkout: Checkout) -> None:
    """Starts the second model's training and stops it in good order after its first checkpoint."""
    before = set(HOME.glob(".graft/runs/*"))
    running = subprocess.Popen(
        [*checkout.command(["train", "--model", "second", "--json"])],
        cwd=HOME,
        env=checkout.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not [
        path
        for path in HOME.glob(".graft/runs/*/checkpoints/*/manifest.json")
        if path.parents[2] not in before
    ]:
        if running.poll() is not None:
            raise SystemExit("the training ended before its first checkpoint")
        time.sleep(0.002)
    running.send_signal(signal.SIGTERM)
    if (code := running.wait()) != STOPPED_IN_ORDER:
        raise SystemExit(f"the interrupted training ended with exit code {code}")


def serve_and_ask(checkout: Checkout) -> dict[str, str]:
    """Serves the project and asks the champion and the base; the exchanges are captured."""
    server = subprocess.Popen(
        checkout.command(["serve", "--port", "0", "--json"]),
        cwd=HOME,
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    text = ""
    while not text.endswith("\n}\n"):
        text += server.stdout.readline()
    url = json.loads(text)["url"]
    answers = {}
    for model in ("champion", "base"):
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 12,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answers[model] = json.load(response)["choices"][0]["message"]["content"]
    server.send_signal(signal.SIGTERM)
    server.wait()
    return answers


def make_project(checkout: Checkout) -> None:
    if HOME.exists():
        shutil.rmtree(HOME)
    write_base(HOME / "model")
    write_log(HOME / "logs" / "log.jsonl")
    (HOME / "graft.yaml").write_text(yaml.safe_dump(SETTINGS, sort_keys=False))
    answer_of(checkout, ["run"])
    answers = serve_and_ask(checkout)
    answer_of(checkout, ["release", "tag", "champion", "keep"])
    answer_of(checkout, ["release", "note", "champion", "made by the old commit"])

    shutil.copytree(HOME / ".graft", HOME / "before")
    whole = answer_of(checkout, ["train", "--model", "second"])
    expected = HOME / "expected"
    shutil.copytree(whole["adapter_folder"], expected / "second")
    shutil.rmtree(HOME / ".graft")
    (HOME / "before").rename(HOME / ".graft")
    interrupt_training(checkout)

    status = answer_of(checkout, ["status"])
    steps = len((HOME / ".graft" / "runs" / whole["run_id"] / "steps.jsonl").read_text().splitlines())
    facts = {
        "made_in": str(HOME),
        "machine": describe_machine(),
        "answers": answers,
        "second": {
            "run": whole["run_id"],
            "steps": whole["steps"],
            "interrupted_at": steps,
            "tensors": hash_tensors(expected / "second" / "adapter_model.safetensors"),
        },
        "status": status,
        "releases": answer_of(checkout, ["release", "list"]),
        "release": answer_of(checkout, ["release", "show", "champion"]),
        "lineage": answer_of(checkout, ["release", "lineage", "champion"]),
        "moves": answer_of(checkout, ["release", "log"]),
        "gate": answer_of(checkout, ["gate"]),
    }
    (expected / "facts.json").write_text(json.dumps(facts, indent=1, sort_keys=True))


def pack(target: Path) -> None:
    """The project as an archive; the names are sorted, the owners left out."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path(entry.name)
        if any(path.match(pattern) for pattern in LEFT_OUT):
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = int(entry.mtime)
        return entry

    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz", preset=9) as tar:
        for path in sorted(HOME.rglob("*")):
            tar.add(path, arcname=str(path.relative_to(HOME)), recursive=False, filter=plain)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit")
    parser.add_argument("--to", type=Path, default=TARGET)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with check_out(resolve_commit(arguments.commit)) as checkout:
        make_project(checkout)
    pack(arguments.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
