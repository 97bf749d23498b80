"""The far side of the sandbox: isolates itself and runs the code. Standard library only.

These files are loaded by a bare interpreter that knows neither the packages of the environment nor the
rest of graftwork; `command.py` next to this folder says how. They are loaded for every run, so they import
little: json, typing, signal and pathlib would take more than half of the time that a run takes.
"""
