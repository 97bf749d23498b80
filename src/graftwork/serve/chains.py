"""Runs a request through a declared chain: prompts from templates, conditions, budgets, fallbacks.

Input: the chains, a request, and a function that asks one model. Output: the answered steps in their order.
`AnswerService` asks the models, sends the last answer and captures each step.
"""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graftwork.engines.protocol import PieceData, estimate_tokens
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import ChatCall
from graftwork.serve.captures import ChainMark
from graftwork.serve.engine_interface import ReplyStream
from graftwork.serve.exchange import RunningExchange
from graftwork.serve.family import last_user_turn
from graftwork.serve.settings import (
    ANSWER,
    CONVERSATION,
    PLACEHOLDER,
    QUESTION,
    ChainCondition,
    ChainSettings,
    ChainStep,
)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_KEPT = ("response_format", "logprobs", "top_logprobs")
"""Fields of the request that the last step gets as the client sent them."""
SKIPPED = "skipped"
FAILED = "failed"


AnsweredStep = tuple[RunningExchange, PieceData | ReplyStream]
"""One model's answer; a stream where it is the last one and the client streams."""
AskStep = Callable[[ChatCall, ChainMark], Awaitable[AnsweredStep]]
"""Asks the model of a call. Raises ApiError or OSError."""
StepCheck = Callable[[Sequence[Mapping[str, str]], str], Awaitable[str | None]]
"""One check of the project, with the messages and the answer: the name of what fails, or None."""


class ChainFailed(ApiError):
    """A step could not be answered, or the budget is used up. The chain's fallback may answer."""


def require_chainable(call: ChatCall) -> None:
    """Reject what a chain cannot answer."""
    if not call.messages or call.choices != 1:
        raise ApiError(400, "a chain answers chats with one choice", param="model", code="chain_unsupported")
    if call.options is not None and call.options.tools:
        raise ApiError(400, "a chain takes no tools", param="tools", code="chain_unsupported")


def read_trace(traceparent: str | None) -> str:
    """The trace id of the client's `traceparent`, or a new one."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    return match[1] if match is not None else uuid.uuid4().hex


@dataclass(slots=True)
class _Budget:
    """Tokens and time of one chain; limits of the enclosing chains apply too."""

    chain: str
    max_tokens: int
    deadline: float
    outer: "_Budget | None" = None
    used: int = 0

    def add(self, tokens: int) -> None:
        self.used += tokens
        if self.outer is not None:
            self.outer.add(tokens)

    def left(self) -> int:
        mine = self.max_tokens - self.used
        return mine if self.outer is None else min(mine, self.outer.left())

    def ends_at(self) -> float:
        return self.deadline if self.outer is None else min(self.deadline, self.outer.ends_at())


class ChainRun:
    """One request on its way through a chain."""

    def __init__(
        self,
        chains: Mapping[str, ChainSettings],
        ask: AskStep,
        *,
        checks: Mapping[str, StepCheck] = {},
        trace: str,
    ) -> None:
        self.chains, self.ask, self.checks, self.trace = chains, ask, checks, trace
        self.answered: list[AnsweredStep] = []
        """Steps that were answered, in their order, of nested chains too."""
        self.outcomes: list[tuple[str, str]] = []
        """Each step with the release that answered, `skipped` or `failed`; for the response headers."""

    async def run(self, name: str, call: ChatCall) -> AnsweredStep:
        """The answer of the last step. Raises ChainFailed with the step's name."""
        await self._run(name, call, outer=None, final=True)
        return self.answered[-1]

    async def _run(self, name: str, call: ChatCall, *, outer: _Budget | None, final: bool) -> str:
        chain = self.chains[name]
        deadline = time.monotonic() + chain.max_seconds
        if call.deadline is not None:
            deadline = min(deadline, call.deadline)
        budget = _Budget(name, chain.max_tokens, deadline, outer)
        answers: dict[str, str] = {}
        last = ""
        for step in chain.steps:
            mark = ChainMark(name, step.name, self.trace)
            if step.when is not None and not await self._holds(step.when, call, answers, last):
                self.outcomes.append((mark.name, SKIPPED))
                answers[step.name] = last
                continue
            values = {**answers, QUESTION: last_user_turn(call.messages), ANSWER: last}
            turns = (f"{m['role']}: {m['content']}" for m in call.messages if m["role"] != "system")
            values[CONVERSATION] = "\n\n".join(turns)
            step_call = _make_call(step, call, values)
            ends = final and step is chain.steps[-1]
            step_call = replace(
                step_call,
                options=call.options if ends else None,
                stream=call.stream and ends and step.when is None,
            )
            if step.model in self.chains:
                last = await self._run(step.model, step_call, outer=budget, final=ends)
            else:
                last = await self._ask_step(step, step_call, mark, budget)
            answers[step.name] = last
        return last

    async def _ask_step(self, step: ChainStep, call: ChatCall, mark: ChainMark, budget: _Budget) -> str:
        error: Exception | None = None
        for model in (step.model, step.fallback):
            if model is None:
                continue
            call = self._limit(replace(call, model=model), mark, budget)
            try:
                exchange, reply = await self.ask(call, mark)
            except (OSError, ApiError) as failure:
                error = error or failure
                continue
            self.answered.append((exchange, reply))
            instead = " (fallback)" if error is not None else ""
            self.outcomes.append((mark.name, exchange.target.release + instead))
            if not isinstance(reply, dict):
                return ""
            budget.add(reply["prompt_tokens"] + reply["reply_tokens"])
            return reply["text"]
        assert error is not None
        self.outcomes.append((mark.name, FAILED))
        if time.monotonic() >= budget.ends_at():
            raise _too_slow(mark, budget) from error
        why = str(error) or type(error).__name__
        status = error.status if isinstance(error, ApiError) else 503
        headers = error.headers if isinstance(error, ApiError) else ()
        raise ChainFailed(
            status, f"step {mark.name} failed: {why}", code="chain_step_failed", headers=headers
        ) from error

    def _limit(self, call: ChatCall, mark: ChainMark, budget: _Budget) -> ChatCall:
        """The call with what is left of tokens and time. Raises if nothing is."""
        if time.monotonic() >= budget.ends_at():
            raise _too_slow(mark, budget)
        prompt = estimate_tokens(sum(len(message["content"]) for message in call.messages))
        remaining = budget.left() - prompt
        if remaining < 1:
            message = (
                f"step {mark.name} is not asked: {budget.used} of {budget.max_tokens} tokens are used and "
                f"its prompt has about {prompt}"
            )
            raise ChainFailed(400, message, code="chain_budget")
        return replace(call, max_tokens=min(call.max_tokens, remaining), deadline=budget.ends_at())

    async def _holds(
        self, when: ChainCondition, call: ChatCall, answers: Mapping[str, str], last: str
    ) -> bool:
        text = last if when.answer_of is None else answers[when.answer_of]
        lower = text.lower()
        if when.contains and not any(part.lower() in lower for part in when.contains):
            return False
        if any(part.lower() in lower for part in when.lacks):
            return False
        if not when.fails:
            return True
        for name in when.fails:
            if await self.checks[name](call.messages, text) is not None:
                return True
        return False

    def headers(self, name: str) -> tuple[tuple[str, str], ...]:
        """The headers of a response, of an error too."""
        return (("x-graft-trace", self.trace), ("x-graft-chain", self.describe(name)))

    def describe(self, name: str) -> str:
        """The value of the response header `x-graft-chain`."""
        return f"{name}: " + ", ".join(f"{step}={outcome}" for step, outcome in self.outcomes)


def _too_slow(mark: ChainMark, budget: _Budget) -> ApiError:
    # No fallback: the time is over for it too.
    message = f"the chain {budget.chain} took too long: it ended before step {mark.name} was answered"
    return ApiError(504, message, code="timeout")


def _make_call(step: ChainStep, call: ChatCall, values: Mapping[str, str]) -> ChatCall:
    """The step's own request."""
    if step.prompt is None and step.system is None:
        messages = call.messages
    else:
        messages = list(call.messages)
        if step.prompt is not None:
            system_turns = [message for message in messages if message["role"] == "system"]
            messages = [*system_turns, {"role": "user", "content": _fill(step.prompt, values)}]
        if step.system is not None:
            turns = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": _fill(step.system, values)}, *turns]
    most = call.max_tokens if step.max_tokens is None else min(call.max_tokens, step.max_tokens)
    body = {key: call.body[key] for key in _KEPT if call.body.get(key) is not None}
    sent = call.body["messages"] if messages is call.messages else messages
    body |= {"model": step.model, "messages": sent, "max_tokens": most, "temperature": call.temperature}
    return replace(call, body=body, model=step.model, messages=messages, max_tokens=most)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Insert answers verbatim: a placeholder within an answer stays text."""
    return PLACEHOLDER.sub(lambda match: values[match[1]], template)
