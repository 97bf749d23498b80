"""`graft worker`: a run that another program drives over standard input and output."""

from typing import Annotated

import typer


def worker(
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Speak the protocol on standard input and output.")
    ] = False,
    packet: Annotated[
        int | None,
        typer.Option(
            "--packet",
            help="4: each message has its length in four bytes before it, as Erlang's {packet, 4}.",
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the protocol and exit.")
    ] = False,
) -> None:
    """Run one training job for another program, controlled by JSON messages.

    Without --packet, each message is a line. Closing standard input stops the run at its next checkpoint;
    the same start message resumes it there. `examples/elixir` has a client.

    Example:  echo '{"type":"start","v":1,"project":"."}' | graft worker --stdio
    """
    import json
    import sys

    if schema:
        from graftwork.api.stdio import protocol_schema

        sys.stdout.write(json.dumps(protocol_schema(), indent=2) + "\n")
        return
    if not stdio or packet not in (None, 4):
        raise typer.BadParameter(
            "give --stdio, with --packet 4 for binary framing; --schema prints the messages"
        )
    from graftwork.api.stdio import serve_stdio

    raise typer.Exit(serve_stdio("packet4" if packet == 4 else "lines"))
