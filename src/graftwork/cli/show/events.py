"""One event of a run as a line."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from graftwork.cli.show.tables import quote
from graftwork.pipeline.runs import Event

COLOURS = {"alert": "red", "word": "yellow", "checkpoint": "green", "look": "cyan"}


def to_markup(event: Event) -> str:
    """The time, what kind it is, and what it says."""
    when = datetime.fromtimestamp(event.at).strftime("%H:%M:%S")
    colour = COLOURS.get(event.kind, "dim")
    return f"[dim]{when}[/] [{colour}]{event.kind:<10}[/] {_WORDS[event.kind](event.body)}"


def _step(body: dict[str, Any]) -> str:
    speed = body["tokens"] / body["seconds"] if body["seconds"] else 0.0
    return (
        f"{body['step']}: loss {body['loss']:.4f}, gradient {body['gradient_norm']:.3g}, "
        f"rate {body['learning_rate']:.2g}, {body['seconds']:.2f} s, {speed:,.0f} tokens/s"
    )


def _look(body: dict[str, Any]) -> str:
    better = " (the best so far)" if body.get("better") else ""
    return f"after step {body['step']}: {quote(body['metric'])} {body['value']:.4f}{better}"


def _alert(body: dict[str, Any]) -> str:
    why = f": {quote(body['why'])}" if body.get("why") else ""
    return f"[bold]{quote(body['what'])}[/]{why}"


def _vital(body: dict[str, Any]) -> str:
    shown = [f"memory {body['memory_gib']:.2f} GiB"]
    if "memory_free_gib" in body:
        shown.append(f"{body['memory_free_gib']:.1f} GiB free")
    if "processor_cores" in body:
        shown.append(f"{body['processor_cores']:.1f} cores busy")
    for device in body.get("devices", []):
        use, taken = device.get("use_percent"), device.get("memory_gib")
        heat, power = device.get("temperature_c"), device.get("power_watts")
        figures = [f"{use:.0f} % use"] if use is not None else []
        figures += [f"{taken:.1f} GiB"] if taken is not None else []
        figures += [f"{heat:.0f} °C"] if heat is not None else []
        figures += [f"{power:.0f} W"] if power is not None else []
        shown.append(f"device {device['index']}: {', '.join(figures)}")
    return "; ".join(shown)


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": _step,
    "look": _look,
    "alert": _alert,
    "vital": _vital,
    "word": lambda body: quote(body["word"]),
    "checkpoint": lambda body: f"after step {body['step']} ({quote(body['folder'])})",
    "output": lambda body: quote(body["text"]),
}
