"""A probe as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.cli.show.training import number
from graftwork.records.base import Figure
from graftwork.records.fit import ProbeFacts

NAMES = {
    "products_bfloat16_tflops": "products in bfloat16",
    "products_float16_tflops": "products in float16",
    "products_float32_gflops": "products in float32",
    "products_fp8_tflops": "products in 8 bits",
    "memory_gb_s": "memory, read and written",
    "to_device_gb_s": "host to card, pinned",
    "from_device_gb_s": "card to host, pinned",
    "context_gib": "the context's memory",
    "launch_microseconds": "calling a kernel",
    "disk_write_mb_s": "disk, written through",
    "disk_read_mb_s": "disk, read",
    "tokens_per_second": "training the whole model",
}


def show_probe(
    console: Console, facts: ProbeFacts, figures: Mapping[str, Figure], files: Sequence[Path]
) -> None:
    driver = f", driver {facts.device.driver}" if facts.device.driver else ""
    print_line(
        console,
        f"[bold]{quote(facts.device.name)}[/]{quote(driver)}, torch {quote(facts.device.torch)}, "
        f"at the sizes of {quote(facts.shape.name)}; certainty: probed, in {facts.seconds:.0f} s",
    )
    rows = table("measured", "value", "range", right=("value",))
    for name, figure in figures.items():
        rows.add_row(
            NAMES.get(name, name),
            f"{number(figure.value)} {figure.unit}",
            f"{number(figure.low)} … {number(figure.high)}",
        )
    console.print(rows)
    for step in facts.steps:
        print_line(
            console,
            f"a step of {step.layers} layers and {step.tokens:,} tokens: {1000 * step.seconds:.0f} ms",
        )
    for missing in facts.left_out:
        print_line(console, f"[yellow]left out[/]: {quote(missing)}")
    print_line(console, f"[dim]kept in {quote(files[0].parent)}[/]")
