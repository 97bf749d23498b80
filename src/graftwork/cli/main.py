"""The `graft` command: registers the commands, and turns expected errors into messages and exit codes.

Imports nothing heavy: each command imports what it needs when it runs, so that `graft --help` is fast.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

import typer

from graftwork.cli import (
    data,
    data_repair,
    data_review,
    evaluate,
    gate,
    model,
    plan,
    project,
    release,
    run,
    serve,
    train,
)
from graftwork.cli.output import print_error
from graftwork.records.errors import EXIT_INTERRUPTED, EXIT_USER_MISTAKE, GraftError, Interrupted

app = typer.Typer(
    name="graft",
    help="Turn agent logs into better small models: audit, prepare, plan, train, evaluate, gate, release, "
    "serve.",
    epilog="Get started:  graft data audit YOUR_LOG.jsonl   ·   graft init   ·   graft run",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("init")(project.init)
data_repair.add_to(data.app)
data_review.add_to(data.app)
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.add_typer(plan.app, name="plan")
app.add_typer(train.app, name="train")
app.add_typer(evaluate.app, name="eval")
app.command("gate")(gate.gate)
app.add_typer(release.app, name="release")
app.add_typer(serve.app, name="serve")
app.command("status")(run.status)
app.command("logs")(run.logs)
app.command("stop")(run.stop)
app.command("doctor")(project.doctor)
app.command("schema")(project.schema)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from graftwork.version import __version__

        print(__version__)
        raise typer.Exit
    del context


def main() -> None:
    """The entry point of `graft`."""
    # Imports create many objects that live until the end: collecting among them takes a tenth of a command.
    gc.set_threshold(100_000, 20, 20)
    as_json = "--json" in sys.argv
    sys.excepthook = _show_bug
    try:
        code = _run()
    except GraftError as error:
        print_error(error, as_json=as_json)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        # A second Ctrl-C exits at once.
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
        message = "interrupted; finished work is kept: run the same command again to continue"
        print_error(Interrupted(message), as_json=as_json)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        # typer turns a closed pipe (`| head`) into exit code 1.
        if isinstance(ended.__context__, BrokenPipeError):
            _exit_quietly()
        raise
    except BrokenPipeError:
        _exit_quietly()
    except OSError as error:
        if error.filename is None:
            raise
        explained = _explain(error)
        print_error(explained, as_json=as_json)
        sys.exit(explained.exit_code)
    except Exception as error:
        show = getattr(error, "show", None)
        if show is None:
            raise
        # A usage error of typer, which formats itself.
        show()
        sys.exit(EXIT_USER_MISTAKE)
    sys.exit(code if isinstance(code, int) else 0)


def _exit_quietly() -> NoReturn:
    """Discards what is still buffered, so that the interpreter does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _run() -> object:
    with _log_to_stderr():
        code = app(standalone_mode=False)
    if code == EXIT_INTERRUPTED:
        # typer catches Ctrl-C and returns this code.
        raise KeyboardInterrupt
    return code


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Prints which project is used, if it is not in the working directory: once, on standard error."""
    log = logging.getLogger("graftwork.project")
    handler = _StderrHandler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _StderrHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        from graftwork.cli.output import stderr

        message = record.getMessage()
        if message not in self._printed:
            self._printed.add(message)
            stderr.print(Text(message, style="dim"), highlight=False, soft_wrap=True)


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a bug, without secrets that the message of a library may contain."""
    from graftwork.text.redact import hide_in_tracebacks

    hide_in_tracebacks()
    sys.excepthook(kind, error, trace)


def _explain(error: OSError) -> GraftError:
    """An error of the operating system about a file, as an error of the environment."""
    from pathlib import Path

    from graftwork.files.disk import explain_os_error

    return explain_os_error(error, Path(str(error.filename)))


if __name__ == "__main__":
    main()
