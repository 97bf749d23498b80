"""`graft chat`: talk to a run, a release, the base or another endpoint, and rate its answers."""

from contextlib import ExitStack
from typing import Annotated

import typer

from graftwork.cli.command import Folder, Model, opened
from graftwork.cli.output import Json, print_json


def chat(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="run:ID, model:NAME, a release or its alias, base, URL#MODEL,key=VARIABLE, or a name under "
            "serve.failover.endpoints. Default: the newest run.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this and exit.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    example: Annotated[
        int | None,
        typer.Option("--example", min=1, help="Ask the held-out case of this number first."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Maximum length. Default: evaluate.max_new_tokens."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    listening: Annotated[bool, typer.Option("--listen", hidden=True)] = False,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Talk to any model of the project, released or not, and rate its answers.

    Answers come from the engine of the evaluation and are captured. With --prompt, or --example and --json,
    one answer is printed.

    Example:  graft chat
    Example:  graft chat champion --example 3
    Example:  graft chat run:2026 --prompt "Where is my order?" --json
    """
    from graftwork.api.project import open_project
    from graftwork.cli.conversation import TerminalChat, answer_once, first_turns
    from graftwork.cli.progress import RichReporter
    from graftwork.evaluate.chat import find_chat_subject, listen, open_chat, read_example

    if listening:
        with opened(project, model) as work:
            listen(work)
        return
    if prompt is not None and example is not None:
        raise typer.BadParameter("--prompt and --example both ask the first question: use one of them")
    if json and prompt is None and example is None:
        raise typer.BadParameter("--json prints one answer: add --prompt TEXT or --example N")
    if example is not None and system is not None:
        raise typer.BadParameter("an example has its own system prompt: leave out --system")
    with ExitStack() as loading:
        reporter = loading.enter_context(RichReporter(tables=False))
        with open_project(project, model=model, reporter=reporter).open() as work:
            case = read_example(work, example) if example is not None else None
            chosen = find_chat_subject(work, subject)
            with open_chat(work, chosen, max_tokens=max_tokens, temperature=temperature) as model_chat:
                loading.close()  # the bar would be drawn over the conversation
                if json:
                    print_json(answer_once(model_chat, first_turns(prompt, system, case), case))
                    return
                conversation = TerminalChat(model_chat, system, lambda number: read_example(work, number))
                if prompt is not None:
                    conversation.ask(prompt)
                else:
                    conversation.run(case)
