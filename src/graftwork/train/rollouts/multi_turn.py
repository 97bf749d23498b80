"""Episodes of several turns: the model replies, an environment in the sandbox answers, until either ends it.

Input: prompts, a writer of replies, an environment. Output: an answer for each episode. Tokens are
concatenated and never encoded again; those of the environment are marked, so that they are not trained.
Nothing of an environment lives between turns: each plays the episode from its beginning, so it must be
deterministic.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graftwork.process.sandbox import Sandbox, SandboxResult, SandboxSettings, open_sandbox
from graftwork.process.sandbox.run import BatchJob, Prelude, run_batch
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Role
from graftwork.records.report import Case
from graftwork.text.tool_calls import add_tools, read_calls
from graftwork.train.rollouts.episodes import EpisodeTurn, SampledAnswer
from graftwork.train.rollouts.measures import seed_of
from graftwork.train.rollouts.sampling import AskedPrompt, AskedReply, WrittenReply
from graftwork.train.settings import EnvironmentSettings, RolloutSettings

PRELUDE = "episode"
MODULES = ("importlib.util", "inspect", "json", "subprocess")
MOST_TEXT = 20_000
"""Characters of one answer of an environment."""


class EnvironmentAnswer(NamedTuple):
    text: str = ""
    done: bool = False
    reward: float | None = None
    failed: str = ""
    """Why there is no answer: the environment crashed, took too long or answered nonsense."""


class Environment:
    """An environment of the project, as its settings name it."""

    def __init__(self, settings: EnvironmentSettings, *, folder: Path, sandbox: SandboxSettings) -> None:
        self._settings = settings
        self._folder = folder
        self._limits = sandbox.model_copy(update={"seconds": settings.seconds})
        self._sandbox: Sandbox | None = None

    def open(self, cases: Sequence[Case]) -> list[tuple[str, tuple[dict[str, Any], ...]]]:
        """Its first message and its tools, for each case; UserError if it does not start."""
        openings = []
        for case, result in zip(cases, self._run([(case, ()) for case in cases]), strict=True):
            why = describe_failure(result)
            fields = {} if why else read_line(result)
            is_text = isinstance(fields.get("text"), str | None)
            tools = fields.get("tools")
            are_tools = isinstance(tools, list | None) and all(isinstance(tool, dict) for tool in tools or ())
            if why or not is_text or not are_tools:
                raise UserError(
                    f"the environment does not start for the case {case.id}",
                    why=why
                    or ("its first answer has no text" if not is_text else "its tools are not objects"),
                    fix="run its `reset` on this case manually; only the standard library and "
                    "`evaluate.sandbox.packages` can be imported",
                    where="train.rollouts.environment",
                )
            cleaned = json.loads(clean_text(json.dumps(tools or [], ensure_ascii=False)))
            openings.append((clean_text(fields.get("text") or ""), tuple(cleaned)))
        return openings

    def answer(self, episodes: Sequence[tuple[Case, Sequence[str]]]) -> list[EnvironmentAnswer]:
        """Return the environment's answers to the last reply of each episode."""
        return [read_answer(result) for result in self._run(episodes)]

    def _run(self, episodes: Sequence[tuple[Case, Sequence[str]]]) -> list[SandboxResult]:
        settings = self._settings
        file, _, name = (settings.python or "").partition(":")
        environment = {"command": list(settings.command), "file": file, "name": name}
        if self._sandbox is None:
            names = environment_files(settings)
            self._files = tuple((path, read_inner(self._folder, path)) for path in names)
            self._sandbox = open_sandbox(self._limits)
        jobs = []
        for case, replies in episodes:
            described = {
                "id": case.id,
                "messages": [message.model_dump() for message in case.messages],
                "reference": case.reference,
                "checks": list(case.checks),
            }
            spoken = []
            for text in replies:
                calls = read_calls(text)
                # `broken`: one of the calls cannot be read.
                listed = [call._asdict() for call in calls or ()]
                spoken.append({"text": text, "calls": listed, "broken": calls is None})
            request = json.dumps({**environment, "case": described, "replies": spoken})
            jobs.append(BatchJob(f"import {PRELUDE}\n{PRELUDE}.main({request!r})\n", self._files))
        source = Path(__file__).with_name("environment_inside.py").read_text()
        return run_batch(jobs, sandbox=self._sandbox, prelude=Prelude(PRELUDE, source, MODULES))


def environment_files(settings: EnvironmentSettings) -> list[str]:
    """The files of the project that the environment gets in the sandbox."""
    modules = [settings.python.partition(":")[0]] if settings.python else []
    return [*modules, *settings.files]


def read_inner(folder: Path, name: str) -> str:
    """The text of a file within the project's folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise UserError(
            f"the environment's file {name} is not in the project's folder",
            fix="specify files relative to the folder of graft.yaml",
            where="train.rollouts.environment",
        )
    return path.read_text()


def describe_failure(result: SandboxResult) -> str:
    """Why a run in the sandbox gave no answer; empty if it gave one."""
    if result.ok and result.stdout.strip():
        return ""
    if result.reason in ("wall_clock", "cpu"):
        return "it took longer than `environment.seconds`"
    if result.reason == "output":
        return "it wrote more than the sandbox takes: answer with a shorter text"
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"it ended by {result.reason or 'itself'} without an answer")[:300]


def read_line(result: SandboxResult) -> dict[str, Any]:
    try:
        fields = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def clean_text(text: str) -> str:
    """The text without characters that no prompt can contain: lone surrogates, and the renderer's guard."""
    from graftwork.model.chat.renderer import GUARD

    return text.encode("utf-8", "replace").decode().replace(GUARD, "\ufffd")


def read_answer(result: SandboxResult) -> EnvironmentAnswer:
    """Validate the answer: nothing that an environment returns can break a run."""
    if why := describe_failure(result):
        return EnvironmentAnswer(failed=why)
    fields = read_line(result)
    text, done, reward = fields.get("text"), fields.get("done", False), fields.get("reward")
    if text is not None and not isinstance(text, str):
        return EnvironmentAnswer(failed=f"it answered with {type(text).__name__} instead of text")
    if not isinstance(done, bool):
        return EnvironmentAnswer(failed="`done` is neither true nor false")
    is_number = isinstance(reward, bool | int | float) and 0 <= reward <= 1
    if reward is not None and not is_number:
        return EnvironmentAnswer(failed=f"its reward is {reward!r:.40} instead of a number from 0 to 1")
    return EnvironmentAnswer(
        clean_text((text or "")[:MOST_TEXT]), done, None if reward is None else float(reward)
    )


class ReplyWriter(Protocol):
    def prepare(self, batch: int) -> None: ...

    def write(
        self, groups: Sequence[Sequence[AskedReply]], *, progress: Callable[[], None]
    ) -> list[list[WrittenReply]]: ...


class EpisodeEnvironment(Protocol):
    def answer(self, episodes: Sequence[tuple[Case, Sequence[str]]]) -> list[EnvironmentAnswer]: ...


class TurnRenderer(Protocol):
    def next_turn(self, role: Role, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@dataclass
class _OpenEpisode:
    prompt: AskedPrompt
    number: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    reward: float | None = None
    failed: str = ""
    truncated: bool = False
    ended: bool = False

    @property
    def replies(self) -> list[str]:
        return [turn.text for turn in self.turns if turn.by == "model"]

    def to_answer(self) -> SampledAnswer:
        return SampledAnswer(
            prompt=self.prompt.id,
            answer=self.number,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            text=self.replies[-1],
            truncated=self.truncated,
            decoy=self.prompt.decoy,
            given=tuple(self.given),
            turns=tuple(self.turns),
            environment_reward=self.reward,
            failed=self.failed,
        )


class EpisodeSampler:
    """`cases` are those of the prompts by id, as the environment was opened with them."""

    def __init__(
        self,
        writer: ReplyWriter,
        environment: EpisodeEnvironment,
        renderer: TurnRenderer,
        *,
        settings: RolloutSettings,
        cases: Mapping[str, Case],
        seed: int,
    ) -> None:
        assert settings.environment is not None
        self._writer = writer
        self._environment = environment
        self._renderer = renderer
        self._settings = settings
        self._limits: EnvironmentSettings = settings.environment
        self._cases = cases
        self._seed = seed

    def sample(
        self, batch: int, prompts: Sequence[AskedPrompt], *, progress: Callable[[], None] = lambda: None
    ) -> list[SampledAnswer]:
        self._writer.prepare(batch)
        episodes = [
            _OpenEpisode(prompt, number)
            for prompt in prompts
            for number in range(self._settings.num_generations)
        ]
        for turn in range(self._limits.turns):
            waiting = [episode for episode in episodes if not episode.ended]
            if not waiting:
                break
            groups: dict[str, list[_OpenEpisode]] = {}
            for episode in waiting:
                groups.setdefault(episode.prompt.id, []).append(episode)
            replies = self._writer.write(
                [[self._ask(batch, turn, episode) for episode in group] for group in groups.values()],
                progress=progress,
            )
            for group, group_replies in zip(groups.values(), replies, strict=True):
                for episode, reply in zip(group, group_replies, strict=True):
                    text = self._renderer.decode(list(reply.spoken))
                    episode.turns.append(EpisodeTurn(by="model", text=text))
                    episode.tokens += reply.tokens
                    episode.logprobs += reply.logprobs
                    # The environment sees a reply that was cut, and the episode ends with it.
                    episode.truncated = not reply.ended
            requests = [(self._cases[episode.prompt.id], episode.replies) for episode in waiting]
            for episode, answer in zip(waiting, self._environment.answer(requests), strict=True):
                self._follow(episode, answer)
                progress()
        for episode in episodes:
            # The limit of turns was reached before the environment was done.
            episode.truncated |= not episode.ended
        return [episode.to_answer() for episode in episodes]

    def _ask(self, batch: int, turn: int, episode: _OpenEpisode) -> AskedReply:
        room = self._limits.max_tokens - len(episode.tokens)
        seed_parts = (self._seed, batch, episode.prompt.id, episode.number)
        return AskedReply(
            tokens=[*episode.prompt.tokens, *episode.tokens],
            max_tokens=min(self._settings.max_completion_length, room),
            seed=seed_of(*seed_parts, turn) if turn else seed_of(*seed_parts),
        )

    def _follow(self, episode: _OpenEpisode, answer: EnvironmentAnswer) -> None:
        """Add what the environment answered, unless the episode ends here."""
        if answer.failed:
            episode.failed, episode.ended = answer.failed, True
            return
        episode.reward = answer.reward
        if answer.text:
            episode.turns.append(EpisodeTurn(by="environment", text=answer.text))
        if answer.done or episode.truncated:
            episode.ended = True
            return
        if len(episode.replies) == self._limits.turns:
            return
        tokens = self._renderer.next_turn(self._limits.role, answer.text)
        if len(episode.tokens) + len(tokens) >= self._limits.max_tokens:
            episode.truncated = episode.ended = True
            return
        start = len(episode.tokens)
        episode.tokens += tokens
        episode.logprobs += [0.0] * len(tokens)
        episode.given.append((start, start + len(tokens)))


def add_opening(case: Case, text: str, tools: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """The prompt with the tools of the environment and its first message."""
    messages = list(add_tools(case.messages, tools))
    if text and messages[-1].role == "user":
        messages[-1] = Message(role="user", content=f"{messages[-1].content}\n\n{text}")
    elif text:
        messages.append(Message(role="user", content=text))
    return tuple(messages)
