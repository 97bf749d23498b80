"""Episodes of several turns: the model replies, the environment answers, until either ends it.

In: prompts, a writer of replies, an environment. Out: an answer for each episode. Tokens are concatenated and
never encoded again: the tokens of a later turn begin with exactly those that were sampled. Tokens of the
environment are marked as given, so that they are not trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from graftwork.records.interaction import Message, Role
from graftwork.records.report import Case
from graftwork.text.tool_calls import add_tools
from graftwork.train.objective_settings import EnvironmentSettings, RolloutSettings
from graftwork.train.rollouts.environment import EnvironmentAnswer
from graftwork.train.rollouts.episodes import EpisodeTurn, SampledAnswer
from graftwork.train.rollouts.groups import seed_of
from graftwork.train.rollouts.sampling import AskedPrompt, AskedReply, WrittenReply


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
            canary=self.prompt.canary,
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
            _OpenEpisode(prompt, number) for prompt in prompts for number in range(self._settings.answers)
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
            for group, written in zip(groups.values(), replies, strict=True):
                for episode, reply in zip(group, written, strict=True):
                    text = self._renderer.decode(list(reply.spoken))
                    episode.turns.append(EpisodeTurn(by="model", text=text))
                    episode.tokens += reply.tokens
                    episode.logprobs += reply.logprobs
                    # The environment sees a reply that was cut, and the episode ends with it.
                    episode.truncated = not reply.ended
            asked = [(self._cases[episode.prompt.id], episode.replies) for episode in waiting]
            for episode, answer in zip(waiting, self._environment.answer(asked), strict=True):
                self._follow(episode, answer)
                progress()
        for episode in episodes:
            # The limit of turns was reached before the environment was done.
            episode.truncated |= not episode.ended
        return [episode.to_answer() for episode in episodes]

    def _ask(self, batch: int, turn: int, episode: _OpenEpisode) -> AskedReply:
        room = self._limits.max_tokens - len(episode.tokens)
        named = (self._seed, batch, episode.prompt.id, episode.number)
        return AskedReply(
            tokens=[*episode.prompt.tokens, *episode.tokens],
            max_tokens=min(self._settings.max_tokens, room),
            seed=seed_of(*named, turn) if turn else seed_of(*named),
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
        begin = len(episode.tokens)
        episode.tokens += tokens
        episode.logprobs += [0.0] * len(tokens)
        episode.given.append((begin, begin + len(tokens)))


def add_opening(case: Case, text: str, tools: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """The prompt with the tools of the environment and what it says first."""
    messages = list(add_tools(case.messages, tools))
    if text and messages[-1].role == "user":
        messages[-1] = Message(role="user", content=f"{messages[-1].content}\n\n{text}")
    elif text:
        messages.append(Message(role="user", content=text))
    return tuple(messages)
