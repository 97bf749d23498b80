"""The `graft` command: registers the commands, and turns expected errors into messages and exit codes.

Imports nothing heavy: each command imports what it needs when it runs, so that `graft --help` is fast.
"""

import gc
import inspect
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from types import TracebackType
from typing import NoReturn

import typer
from typer.core import TyperGroup

from graftwork.cli.output import print_error, stderr
from graftwork.records.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, GraftError, Interrupted

COMMANDS = {
    "init": "project:init",
    "run": "run:run",
    "status": "run:status",
    "logs": "run:logs",
    "stop": "run:stop",
    "ui": "ui:ui",
    "doctor": "project:doctor",
    "data": "data:app",
    "plan": "plan:app",
    "train": "train:app",
    "eval": "evaluate:app",
    "chat": "chat:chat",
    "gate": "gate:gate",
    "release": "release:app",
    "serve": "serve:app",
    "up": "up:up",
    "fleet": "fleet:app",
    "model": "model:app",
    "reward": "train:reward_app",
    "spec": "spec:app",
    "generate": "generate:app",
    "worker": "run:worker",
    "schema": "project:schema",
}
"""Name -> module of `cli/` and what it defines: a function, or the app of a group; in the order of help."""
PANELS = {"init": "Project", "data": "Steps of the pipeline", "up": "More"}
"""The first command under each heading of the help."""


def make_app(names: Collection[str] = tuple(COMMANDS), *, empty_groups: bool = False) -> typer.Typer:
    """The command line with these commands; only their modules are imported.

    With `empty_groups`, groups have a name and a help text, and no commands.
    """
    app = typer.Typer(
        name="graft",
        cls=_InOrder,
        help="Turn agent logs into better small models: audit, prepare, plan, train, evaluate, gate, "
        "release, serve.",
        epilog="Get started:  graft data audit YOUR_LOG.jsonl   ·   graft init   ·   graft run",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_version)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(":")
        found = getattr(import_module(f"graftwork.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            group = _without_commands(found) if empty_groups else found
            app.add_typer(group, name=name, rich_help_panel=_panel(name))
        else:
            app.command(name, rich_help_panel=_panel(name))(found)
    _reflow_help(app)
    return app


class _InOrder(TyperGroup):
    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [name for name in COMMANDS if name in self.commands]


def _panel(name: str) -> str:
    names = tuple(COMMANDS)
    return next(PANELS[first] for first in reversed(names[: names.index(name) + 1]) if first in PANELS)


def _reflow_help(app: typer.Typer) -> None:
    """Docstrings wrap at the width of the source; help wraps at the width of the terminal."""
    for command in app.registered_commands:
        command.help = reflow(command.help or inspect.getdoc(command.callback) or "")
        command.short_help = first_sentence(command.help)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        callback = group.typer_instance.registered_callback
        if callback is not None and callback.callback is not None:
            text = reflow(inspect.getdoc(callback.callback) or "")
            callback.help = text or callback.help
            group.short_help = first_sentence(text) if text else None
        _reflow_help(group.typer_instance)


def reflow(text: str) -> str:
    """Put each paragraph on one line; examples and exit codes start a new line."""
    return re.sub(r"(?<!\n)\n(?!\n|Example:|Exit code)", " ", text)


def first_sentence(text: str) -> str:
    """The help text in lists of commands."""
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _without_commands(group: typer.Typer) -> typer.Typer:
    emptied = copy(group)
    emptied.registered_commands, emptied.registered_groups = [], []
    return emptied


def make_needed_app(arguments: Sequence[str]) -> typer.Typer:
    """Build the app for the requested command only; with all names for help, options and mistyped names, and
    everything for completion.
    """
    if any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ):
        return make_app()
    first = arguments[0] if arguments else ""
    return make_app((first,)) if first in COMMANDS else make_app(empty_groups=True)


def __getattr__(name: str) -> object:
    if name == "app":
        return make_app()
    raise AttributeError(name)


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
    # Records use no plugins; the search for them reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")
    # Matrices are small here. On a busy machine numpy's threads waited for each other, in busy loops, for ten
    # times as long as the audit's decomposition takes. Models compute in workers, and not through numpy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    as_json = "--json" in sys.argv
    sys.excepthook = _show_bug
    repeat_lost_interrupts()
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
        sys.exit(EXIT_USER_ERROR)
    sys.exit(code if isinstance(code, int) else 0)


_PAUSE_SECONDS = 0.05


def repeat_lost_interrupts() -> None:
    """Send a Ctrl-C again that was raised where Python drops exceptions.

    Python calls back when an import ends or an object is deleted; an exception there is only printed.
    """
    usual = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            usual(unraisable)
            return
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # Not at once: it would be raised in this hook, and dropped again.
        timer = threading.Timer(_PAUSE_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook


def _exit_quietly() -> NoReturn:
    """Discard buffered output, so that the interpreter does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _run() -> object:
    with _log_to_stderr():
        code = make_needed_app(sys.argv[1:])(standalone_mode=False)
    if code == EXIT_INTERRUPTED:
        # typer catches Ctrl-C and returns this code.
        raise KeyboardInterrupt
    return code


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Print which project is used, once, on standard error, if it is not in the working directory."""
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

        message = record.getMessage()
        if message not in self._printed:
            self._printed.add(message)
            stderr.print(Text(message, style="dim"), highlight=False, soft_wrap=True)


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a bug, without secrets that the message of a library may contain."""
    from graftwork.text.redact import hide_in_tracebacks

    hide_in_tracebacks()
    sys.excepthook(kind, error, trace)


def _explain(error: OSError) -> GraftError:
    """Convert an operating system error about a file to an environment error."""
    from pathlib import Path

    from graftwork.files.disk import explain_os_error

    return explain_os_error(error, Path(str(error.filename)))


if __name__ == "__main__":
    main()
