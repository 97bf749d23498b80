"""`graft reward`: whether the rewards of reinforcement learning can be trusted."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, Model, opened
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.pipeline.reward_check import RewardCheck

app = typer.Typer(help="Check the rewards of reinforcement learning.", no_args_is_help=True)

Cases = Annotated[int, typer.Option("--cases", min=1, help="Prompts to try every answer on.")]


@app.callback()
def _group() -> None:
    """Check the rewards of reinforcement learning."""


@app.command("check")
def check(project: Folder = None, model: Model = None, cases: Cases = 4, json: Json = False) -> None:
    """Try the reference, an empty answer and a catalogue of hacks against the rewards of graft.yaml.

    Exit code 0 if every reference is rewarded and no hack is, 1 if not. Needs a prepared dataset, or a file
    of cases under `train.rollouts.source`.

    Example:  graft reward check --cases 8
    """
    from graftwork.cli.output import print_json
    from graftwork.pipeline.reward_check import check_rewards

    with opened(project, model) as work:
        found = check_rewards(work, cases=cases)
    if json:
        print_json({**found.model_dump(mode="json"), "sound": found.sound})
    else:
        _show(found)
    raise typer.Exit(0 if found.sound else 1)


def _show(found: "RewardCheck") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote, table

    gold = "no reference" if found.gold is None else f"{found.gold:.2f}"
    rewarded = len({item.name for item in found.rewarded})
    print_line(
        stdout,
        f"{found.hacks} hacks on {found.cases} prompts: {rewarded} rewarded; "
        f"references get {gold}; {found.seconds_per_answer:.2f} s an answer",
    )
    if found.rewarded or found.gold_failed or found.failed:
        rows = table("prompt", "answer", "reward", "parts", right=("reward",))
        for item in (*found.gold_failed, *found.rewarded, *found.failed)[:40]:
            parts = item.failed or {
                name: f"{value:.2f}" for name, value in item.parts.items() if value is not None
            }
            shown = "–" if item.reward is None else f"{item.reward:.2f}"
            rows.add_row(
                quote(item.case),
                quote(item.name),
                shown,
                quote(", ".join(f"{k} {v}" for k, v in parts.items())),
            )
        stdout.print(rows)
    print_line(stdout, "[green]the rewards hold[/]" if found.sound else "[red]the rewards do not hold[/]")
