"""`graft`: gathers the verbs, and turns every expected error into words and an exit code.

Imports nothing heavy: each verb fetches what it needs when it is called, so that `graft --help`
answers at once.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NoReturn

import typer

from graftwork.cli import data, evaluate, gate, plan, project, release, run, serve, train
from graftwork.cli.output import print_error
from graftwork.records.errors import EXIT_INTERRUPTED, EXIT_USER_MISTAKE, GraftError, Interrupted

app = typer.Typer(
    name="graft",
    help="Turn your agent logs into a better small model: audit, prepare, plan, train, evaluate, "
    "gate, release, serve.",
    epilog="Start here:  graft data audit YOUR_LOG.jsonl   ·   graft init   ·   graft run",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("init")(project.init)
app.add_typer(data.app, name="data")
app.add_typer(plan.app, name="plan")
app.add_typer(train.app, name="train")
app.add_typer(evaluate.app, name="eval")
app.command("gate")(gate.gate)
app.add_typer(release.app, name="release")
app.command("serve")(serve.serve)
app.command("status")(run.status)
app.command("logs")(run.logs)
app.command("stop")(run.stop)
app.command("doctor")(project.doctor)
app.command("schema")(project.schema)


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from graftwork import __version__

        print(__version__)
        raise typer.Exit
    del context


def main() -> None:
    """The entry point: exit codes as the design names them."""
    as_json = "--json" in sys.argv
    sys.excepthook = _show_bug
    try:
        code = _run()
    except GraftError as error:
        print_error(error, as_json=as_json)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        # Whoever presses it again wants to be out.
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(EXIT_INTERRUPTED))
        words = "interrupted; run the same command again: what was finished is kept"
        print_error(Interrupted(words), as_json=as_json)
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        # The libraries that print turn a reader that has seen enough (`| head`) into exit code 1.
        if isinstance(ended.__context__, BrokenPipeError):
            _leave_quietly()
        raise
    except BrokenPipeError:
        _leave_quietly()
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
        # A usage error of the command line library: it knows best how to show itself.
        show()
        sys.exit(EXIT_USER_MISTAKE)
    sys.exit(code if isinstance(code, int) else 0)


def _leave_quietly() -> NoReturn:
    """What is still buffered goes nowhere, or the interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _run() -> object:
    with _tell_words():
        code = app(standalone_mode=False)
    if code == EXIT_INTERRUPTED:
        # The command line library swallows Ctrl-C and only gives back this code.
        raise KeyboardInterrupt
    return code


@contextmanager
def _tell_words() -> Iterator[None]:
    """Which project is used where it is not that of the working folder, once, on standard error."""
    log = logging.getLogger("graftwork.project")
    told = _Told()
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(told)
        log.setLevel(level)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._words: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        from rich.text import Text

        from graftwork.cli.output import stderr

        words = record.getMessage()
        if words not in self._words:
            self._words.add(words)
            stderr.print(Text(words, style="dim"), highlight=False, soft_wrap=True)


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback of a bug, without the secrets that the words of a library may hold."""
    from graftwork.text.publish import hide_in_tracebacks

    hide_in_tracebacks()
    sys.excepthook(kind, error, trace)


def _explain(error: OSError) -> GraftError:
    """A file that the system refuses is the environment's fault, wherever it was met."""
    from pathlib import Path

    from graftwork.files.disk import explain_os_error

    return explain_os_error(error, Path(str(error.filename)))


if __name__ == "__main__":
    main()
