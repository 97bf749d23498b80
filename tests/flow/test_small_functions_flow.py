"""The example of reinforcement learning trains: inside the worker a right answer gets its reward."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from graftwork.train.rollouts.episodes import EpisodeJournal
from graftwork.train.run_folder import read_steps

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "small_functions"
RIGHT, WRONG = "def double(n): return n * 2", "def double(n): return n * 3"
NOBODY = 65534


def write_base(folder: Path, source: Path) -> None:
    """A model that gives one of two answers to every prompt, by chance: each token decides the next."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shutil.copytree(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    last = (prompt if isinstance(prompt, list) else prompt["input_ids"])[-1]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig.from_pretrained(folder, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    follows: dict[int, set[int]] = {}
    for answer in (RIGHT, WRONG):
        tokens = [last, *tokenizer(answer, add_special_tokens=False)["input_ids"], end]
        for before, after in pairwise(tokens):
            follows.setdefault(before, set()).add(after)
    assert sorted(map(len, follows.values()))[-2:] == [1, 2], "the answers part at one token"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
                parameter.zero_()
        for number, (before, after) in enumerate(follows.items()):
            model.model.embed_tokens.weight[before, number] = 1.0
            for token in after:
                model.lm_head.weight[token, number] = 10.0
    model.save_pretrained(folder)


def write_project(folder: Path, tiny_base: Path) -> None:
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".graft"))
    write_base(folder / "base", tiny_base)
    settings = yaml.safe_load((folder / "graft.yaml").read_text())
    settings["base"] = str(folder / "base")
    rewarded = settings["models"]["rewarded"]["train"]
    del rewarded["start_from"]
    rewarded["rollouts"] |= {"steps": 1, "prompts": 1}
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    cases = (folder / "learn.jsonl").read_text().splitlines()
    (folder / "learn.jsonl").write_text(cases[0] + "\n")
    assert json.loads(cases[0])["id"] == "arithmetic/double"


def interpreter_of(user: int) -> str | None:
    """A Python of this version that the user may start: root's own may lie in a private folder."""
    name = "python{}.{}".format(*sys.version_info[:2])
    for candidate in (sys.executable, f"/usr/local/bin/{name}", f"/usr/bin/{name}"):
        try:
            subprocess.run([candidate, "-c", ""], check=True, user=user, group=user, extra_groups=[])
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    return None


@pytest.fixture
def home():
    """A folder that any user can reach: those of pytest are private."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def without_bubblewrap(folder: Path) -> str:
    """A PATH with all commands but `bwrap`: code is then shut in by namespaces of our own."""
    folder.mkdir()
    for entry in reversed(os.environ["PATH"].split(os.pathsep)):
        for command in Path(entry).glob("*"):
            link = folder / command.name
            link.unlink(missing_ok=True)
            if command.name != "bwrap":
                link.symlink_to(command)
    return str(folder)


def train(
    project: Path, home: Path, *, umask: int, user: int | None, path: str
) -> subprocess.CompletedProcess:
    command, more = sys.executable, {}
    if user is not None:
        command = interpreter_of(user)
        if command is None:
            pytest.skip("no Python of this version that an ordinary user may start")
        for file in (home, *home.rglob("*")):
            os.chown(file, user, user, follow_symlinks=False)
        more = {"user": user, "group": user, "extra_groups": []}
    packages = [str(REPOSITORY / "src"), sysconfig.get_path("purelib")]
    own = os.environ if user is None else {"PYTHONPATH": os.pathsep.join(packages)}
    before = os.umask(umask)
    try:
        return subprocess.run(
            [command, "-m", "graftwork.cli.main", "train", "--model", "rewarded"],
            cwd=project,
            env={**own, "PATH": path, "HOME": str(home)},
            capture_output=True,
            text=True,
            check=False,
            **more,
        )
    finally:
        os.umask(before)


CASES = [
    pytest.param(None, 0o077, False, id="own-077-namespaces"),
    pytest.param(None, 0o077, True, id="own-077", marks=pytest.mark.slow),
    pytest.param(None, 0o022, True, id="own-022", marks=pytest.mark.slow),
    pytest.param(NOBODY, 0o077, False, id="ordinary-077-namespaces", marks=pytest.mark.slow),
    pytest.param(NOBODY, 0o077, True, id="ordinary-077", marks=pytest.mark.slow),
    pytest.param(NOBODY, 0o022, True, id="ordinary-022", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("user", "umask", "bubblewrap"), CASES)
def test_the_example_trains_with_reward_whoever_runs_it(home, tiny_base, user, umask, bubblewrap):
    if user is not None and os.getuid():
        pytest.skip("only root can become somebody else")
    path = os.environ["PATH"] if bubblewrap else without_bubblewrap(home / "bin")
    project = home / "project"
    write_project(project, tiny_base)
    done = train(project, home, umask=umask, user=user, path=path)
    if "generated code cannot be sandboxed" in done.stdout + done.stderr:
        pytest.skip("no way to shut code in works here")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = {path.parents[1] for path in project.rglob("000001.answers.json")}
    journal = EpisodeJournal(run)
    verdicts = journal.verdicts(1)
    rewards = {answer.text: verdicts[answer.key].reward for answer in journal.answers(1) if not answer.decoy}
    assert rewards == {RIGHT: 1.0, WRONG: 0.0}
    (step,) = read_steps(run)
    assert 0 < step.measures["reward"] < 1
