"""Episodes of several turns: tokens are concatenated, an environment is not trained and breaks no run."""

import json
from pathlib import Path

import pytest
import torch
from test_train_rollouts import make_cases, make_grpo_job, run_training  # noqa: F401

from graftwork.files.disk import Journal
from graftwork.model.chat.template import ChatTemplate
from graftwork.process.sandbox import SandboxSettings
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.train.objectives.policy import PolicyGradient
from graftwork.train.objectives.samples import TrainingSample, scale_policy
from graftwork.train.rollouts.episodes import EpisodeJournal
from graftwork.train.rollouts.multi_turn import Environment, EnvironmentAnswer, EpisodeSampler, add_opening
from graftwork.train.rollouts.sampling import AskedPrompt, RolloutSampler, WrittenReply
from graftwork.train.run_folder import read_steps
from graftwork.train.settings import EnvironmentSettings, PolicySettings, RolloutSettings

ENVIRONMENT = '''
import time

class Guess:
    def reset(self, case):
        self.tries = 0
        return f"The number has {len(case['reference'])} letters."

    def step(self, text):
        self.tries += 1
        if "crash" in text:
            raise RuntimeError("the game broke")
        if "hang" in text:
            time.sleep(600)
        if "nonsense" in text:
            return {"text": "x", "reward": float("nan")}
        if "huge" in text:
            return {"text": "x", "reward": 10**400}
        if "half" in text:
            return "half \\ud800 and guard \\ue000"
        if "right" in text:
            return {"text": "yes", "done": True, "reward": 1 / self.tries}
        return f"no, try {self.tries + 1}"

class Shop:
    """Tools."""

    def reset(self, case):
        self.bought = []

    def price(self, item: str) -> float:
        """Look up a price."""
        if item != "tea":
            raise ValueError(f"there is no {item}")
        return 2.5

    def buy(self, item: str, count: int = 1):
        self.bought += [item] * count
        return {"bought": self.bought}

    def reward(self, text):
        return float(self.bought == ["tea", "tea"] and "done" in text)
'''
COMMAND = """
import json, sys
case = json.loads(sys.stdin.readline())
print(json.dumps({"text": "begin " + case["case"]["id"]}), flush=True)
for number, line in enumerate(sys.stdin):
    reply = json.loads(line)["text"]
    if reply == "leave":
        sys.exit(3)
    print(json.dumps({"text": reply.upper(), "done": number == 1, "reward": 0.5}), flush=True)
"""
CASE = make_cases(1)[0]


@pytest.fixture
def environment(tmp_path):
    def make(**settings):
        (tmp_path / "envs").mkdir(exist_ok=True)
        (tmp_path / "envs" / "game.py").write_text(ENVIRONMENT)
        (tmp_path / "envs" / "echo.py").write_text(COMMAND)
        given = EnvironmentSettings.model_validate({"seconds": 60, **settings})
        return Environment(given, folder=tmp_path, sandbox=SandboxSettings())

    return make


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_class_with_step_answers_each_reply_in_the_sandbox(environment):
    game = environment(python="envs/game.py:Guess")
    assert game.open([CASE])[0][0] == "The number has 4 letters."
    replies = [["a"], ["a", "b"], ["a", "right"]]
    found = game.answer([(CASE, given) for given in replies])
    assert found == [
        EnvironmentAnswer("no, try 2"),
        EnvironmentAnswer("no, try 3"),
        EnvironmentAnswer("yes", done=True, reward=0.5),
    ]


def test_an_environment_that_crashes_hangs_or_answers_nonsense_costs_its_own_episode(environment):
    replies = ["crash", "fine", "nonsense", "huge"]
    crash, fine, *wrong = environment(python="envs/game.py:Guess").answer(
        [(CASE, [text]) for text in replies]
    )
    assert crash.failed == "RuntimeError: the game broke"
    assert fine == EnvironmentAnswer("no, try 2")
    assert "nan instead of a number" in wrong[0].failed
    assert "instead of a number" in wrong[1].failed
    quick = environment(python="envs/game.py:Guess", seconds=2)
    fine, hung = quick.answer([(CASE, ["fine"]), (CASE, ["hang"])])
    assert "longer than" in hung.failed
    # On a busy machine any answer may take as long.
    assert fine == EnvironmentAnswer("no, try 2") or "longer than" in fine.failed


def test_characters_that_no_prompt_can_hold_are_replaced_in_what_an_environment_says(
    environment, tmp_path, embedded_base
):
    game = environment(python="envs/game.py:Guess")
    (answer,) = game.answer([(CASE, ["half"])])
    assert answer == EnvironmentAnswer("half ? and guard \ufffd")
    assert ChatTemplate.from_folder(Path(embedded_base.folder)).next_turn("user", answer.text)
    odd = (
        'class Odd:\n  def reset(self, case):\n    return "\\ud800\\ue000"\n  def act(self):\n    "\\ue000"\n'
    )
    (tmp_path / "envs" / "game.py").write_text(odd)
    ((text, tools),) = Environment(
        EnvironmentSettings(python="envs/game.py:Odd", seconds=60), folder=tmp_path, sandbox=SandboxSettings()
    ).open([CASE])
    assert text == "?\ufffd"
    assert tools[0]["function"]["description"] == "\ufffd"


def test_an_environment_whose_tools_are_no_objects_is_refused(environment, tmp_path):
    echo = environment(command=("python", "envs/echo.py"), files=("envs/echo.py",))
    (tmp_path / "envs" / "echo.py").write_text('print(\'{"text": "a", "tools": 5}\')')
    with pytest.raises(UserError, match="does not start") as refused:
        echo.open([CASE])
    assert "tools" in refused.value.why


def test_methods_of_a_class_are_tools_and_wrong_calls_are_answered(environment):
    shop = environment(python="envs/game.py:Shop")
    ((text, tools),) = shop.open([CASE])
    assert [tool["function"]["name"] for tool in tools] == ["buy", "price"]
    assert tools[1]["function"]["parameters"]["required"] == ["item"]
    prompt = add_opening(CASE, text, tools)
    assert prompt[0].role == "system"
    assert '"price"' in prompt[0].content
    replies = [
        [call("price", item="tea")],
        [call("price", item="rope")],
        [call("sell", item="tea")],
        [call("price", thing="tea")],
        [call("buy", item="tea", count=2), "done"],
        ["<tool_call>{price tea}</tool_call>"],
        [f"{call('buy', item='tea')} <tool_call>{{}}</tool_call>"],
        ["no call, but a brace {"],
    ]
    found = shop.answer([(CASE, given) for given in replies])
    assert [answer.text for answer in found[:3]] == [
        "2.5",
        "error: there is no rope",
        "error: there is no tool sell",
    ]
    assert found[3].text.startswith("error: ")
    assert found[4].done
    assert found[4].reward == 1.0
    broken = "error: a call is not JSON with name and arguments"
    assert found[5:7] == [EnvironmentAnswer(broken, reward=0.0)] * 2
    assert found[7] == EnvironmentAnswer(done=True, reward=0.0)


def test_a_command_answers_json_lines_and_its_end_is_named(environment):
    echo = environment(command=("python", "envs/echo.py"), files=("envs/echo.py",))
    assert echo.open([CASE])[0][0] == "begin case0"
    found = echo.answer([(CASE, ["a"]), (CASE, ["a", "b"]), (CASE, ["leave"])])
    assert found[:2] == [EnvironmentAnswer("A", reward=0.5), EnvironmentAnswer("B", done=True, reward=0.5)]
    assert "exit code 3" in found[2].failed


def test_an_environment_that_does_not_start_is_refused_with_the_case(environment, tmp_path):
    with pytest.raises(UserError, match="case0") as refused:
        environment(python="envs/game.py:Missing").open([CASE])
    assert "Missing" in refused.value.why
    with pytest.raises(UserError, match="not in the project's folder"):
        environment(python="../outside.py:Guess").open([CASE])


@pytest.mark.parametrize("given", [{}, {"python": "a.py:A", "command": ["x"]}, {"python": "a.py"}])
def test_environment_settings_name_either_a_class_or_a_command(given):
    with pytest.raises(ValueError, match=r"either|names no class"):
        EnvironmentSettings.model_validate(given)


class Writer:
    """Writes the same reply each turn, and notes what it was asked."""

    def __init__(self, reply=(50, 51, 2), ended=True):
        self.asked = []
        self._reply = WrittenReply(tuple(reply), (-0.5,) * len(reply), ended)

    def prepare(self, batch):
        pass

    def write(self, groups, *, progress):
        self.asked.append([[list(asked.tokens) for asked in group] for group in groups])
        return [[self._reply for _ in group] for group in groups]


class Renderer:
    def next_turn(self, role, text):
        return [9, 9]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


class Answers:
    def __init__(self, *answers):
        self._answers = answers

    def answer(self, episodes):
        return [self._answers[min(len(replies), len(self._answers)) - 1] for _, replies in episodes]


def sample(writer, environment, **limits):
    given = {"python": "a.py:A", **limits}
    settings = RolloutSettings(prompts=1, num_generations=2, max_completion_length=4, environment=given)
    sampler = EpisodeSampler(
        writer, environment, Renderer(), settings=settings, cases={"case0": CASE}, seed=1
    )
    return sampler.sample(1, [AskedPrompt("case0", [1, 3])])


def test_tokens_of_turns_are_concatenated_and_those_of_the_environment_are_marked():
    writer = Writer()
    found = sample(writer, Answers(EnvironmentAnswer("go on"), EnvironmentAnswer("yes", True, 0.75)))
    assert writer.asked[1] == [[[1, 3, 50, 51, 2, 9, 9]] * 2]
    answer = found[0]
    assert answer.tokens == (50, 51, 2, 9, 9, 50, 51, 2)
    assert answer.written == [True] * 3 + [False] * 2 + [True] * 3
    assert answer.logprobs == (-0.5,) * 3 + (0.0,) * 2 + (-0.5,) * 3
    assert (answer.environment_reward, answer.truncated, answer.failed) == (0.75, False, "")
    assert [turn.text for turn in answer.turns] == ["50 51", "go on", "50 51", "yes"]


def test_an_environment_that_never_ends_stops_at_the_limit_of_turns():
    writer = Writer()
    answer = sample(writer, Answers(EnvironmentAnswer("again", reward=0.2)), turns=3)[0]
    assert len(writer.asked) == 3
    assert answer.truncated
    assert answer.given == ((3, 5), (8, 10))


def test_an_episode_ends_at_its_limit_of_tokens():
    answer = sample(Writer(), Answers(EnvironmentAnswer("again")), max_tokens=10, turns=9)[0]
    assert answer.truncated
    assert len(answer.tokens) <= 10
    cut = sample(Writer(reply=(50, 51), ended=False), Answers(EnvironmentAnswer("again")))[0]
    assert cut.truncated
    assert cut.tokens == (50, 51)


def test_the_next_turn_is_what_the_template_itself_would_write(embedded_base):
    template = ChatTemplate.from_folder(Path(embedded_base.folder))
    asked = (Message(role="user", content="Guess."),)
    for text in ("higher", "a <|im_end|> b", "", "two\nlines "):
        reply = Message(role="assistant", content="Is it 5?")
        whole = template.prompt((*asked, reply, Message(role="user", content=text)))
        rendered = template.render(asked, reply.content)
        assert [*rendered.tokens, *template.next_turn("user", text)] == whole


def make_sample(factors):
    return TrainingSample(
        id="a",
        origin=CASE.origin,
        messages=CASE.messages,
        reply="",
        tokens=(1, 3, 50, 51, 9, 9, 52),
        trained_from=2,
        unit="u",
        part="rl",
        advantage=0.5,
        sampled=(-1.0, -1.0, 0.0, 0.0, -1.0),
        reference=(-1.0, -1.0, 0.0, 0.0, -1.0),
        factors=factors,
    )


@pytest.mark.parametrize("loss", ["grpo", "cispo", "gspo"])
def test_tokens_of_the_environment_have_no_weight_and_change_none(loss):
    rows = scale_policy([make_sample((1.0, 1.0, 0.0, 0.0, 1.0))], how="dapo", max_tokens=8)
    policy = PolicyGradient(PolicySettings(loss=loss, kl=0.1))
    found = []
    for environment in (-0.1, -9.0):
        now = torch.tensor([-0.9, -1.05, environment, environment, -1.1])
        found.append(policy.weights(rows, lambda now=now: [now])[0])
        assert policy.measure(rows, [now])["kl"].numel() == 3
    assert torch.equal(found[0], found[1])
    assert found[0][2:4].tolist() == [0.0, 0.0]
    assert bool((found[0][[0, 1, 4]] != 0).all())
    assert rows[0].scale == pytest.approx(1 / 3)


def end_some_replies(monkeypatch):
    """A random model never ends a reply by itself: every second one ends here."""
    write = RolloutSampler.write

    def ended(self, groups, *, progress):
        written = write(self, groups, progress=progress)
        return [
            [
                WrittenReply((*reply.tokens[:-1], self._end), reply.logprobs, True) if at % 2 else reply
                for at, reply in enumerate(replies)
            ]
            for replies in written
        ]

    monkeypatch.setattr(RolloutSampler, "write", ended)


def test_a_run_with_an_environment_journals_episodes_and_trains(
    tiny_base,
    tmp_path,
    run_training,  # noqa: F811
    monkeypatch,
):
    end_some_replies(monkeypatch)
    game = """
class Letters:
    def reset(self, case):
        self.messages = len(case["messages"])
        return "Begin."

    def step(self, text):
        if self.messages != 1:
            raise KeyError("another case than at the opening")
        if len(text) % 5 == 0:
            raise KeyError("unlucky")
        return {"text": "more", "reward": min(text.count("e") / 4, 1.0)}
"""
    rollouts = {
        "steps": 2,
        "prompts": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "truncated": "grade",
        "environment": {"python": "game.py:Letters", "turns": 2, "max_tokens": 40, "seconds": 60},
    }
    job = make_grpo_job(tiny_base, tmp_path / "run", rollouts=rollouts)
    spec = {**job.plan.train["rewards"], "parts": [{"metric": "environment"}]}
    train = {**job.plan.train, "rewards": spec}
    train["settings"] = {**train["settings"], "rewards": [{"metric": "environment"}]}
    job = job.model_copy(update={"plan": job.plan.model_copy(update={"train": train})})
    Path(job.project_folder, "game.py").write_text(game)
    run_training(job)
    answers = EpisodeJournal(tmp_path / "run").answers(1)
    assert all(answer.turns for answer in answers)
    assert any(answer.given for answer in answers)
    (first, _) = read_steps(tmp_path / "run")
    assert first.measures["turns"] > 1
    failed = [answer for answer in answers if answer.failed]
    assert not any("another case" in answer.failed for answer in failed)
    assert first.measures["failed_episodes"] == len(failed)
    messages = [line["message"] for line in Journal(tmp_path / "run" / "messages.jsonl").read()]
    assert sum("environment failed on the answer" in message for message in messages) >= len(failed)
