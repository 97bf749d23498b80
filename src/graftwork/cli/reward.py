"""`graft reward`: whether the rewards of reinforcement learning can be trusted."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, Model, opened
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.text.wording import plural
from graftwork.views.document import quote
from graftwork.views.terminal import print_line, table

if TYPE_CHECKING:
    from graftwork.pipeline.preflight import RewardCheck

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
    from graftwork.pipeline.preflight import check_rewards

    with opened(project, model) as work, stderr.status("trying the reference and the catalogue of hacks"):
        found = check_rewards(work, cases=cases)
    if json:
        print_json({**found.model_dump(mode="json"), "sound": found.sound})
    else:
        _show(found)
    raise typer.Exit(0 if found.sound else 1)


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the package. It must not exist.")]
PackageName = Annotated[
    str | None, typer.Option("--name", help="Name of the task set. Default: the project.")
]
CaseFile = Annotated[
    Path | None, typer.Option("--cases", help="JSONL file of cases. Default: the prompts of rollouts.")
]


@app.command("export")
def export(
    out: Out,
    name: PackageName = None,
    cases: CaseFile = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Export prompts and rewards as a task set of verifiers v1, a package for `vf-eval` and its trainers.

    The package grades with graftwork, which its environment needs too, without torch.

    Example:  graft reward export --out tasks/small_functions
    """
    from graftwork.train.taskset_export import export_taskset

    with opened(project, model) as work:
        made = export_taskset(work, out, name=name, cases=cases)
    if json:
        print_json(made.model_dump(mode="json"))
        return
    print_line(stdout, f"{made.tasks} tasks with {', '.join(map(quote, made.rewards))}: {quote(made.folder)}")
    for file in made.files:
        print_line(stdout, f"copied {quote(file)}")
    print_line(stdout, f"next: pip install -e {quote(made.folder)}, then vf-eval {quote(made.name)} -n 3")


def _show(found: "RewardCheck") -> None:
    from graftwork.pipeline.preflight import GOLD, explain

    ungraded = "references are not graded" if found.references else "no prompt has a reference"
    gold = ungraded if found.gold is None else f"references get {found.gold:.2f}"
    rewarded = len({item.name for item in found.rewarded})
    prompts = "1 prompt" if found.cases == 1 else f"{found.cases} prompts"
    print_line(
        stdout,
        f"{found.hacks} hacks on {prompts}: {rewarded} rewarded; {gold}; "
        f"{found.seconds_per_answer:.2f} s an answer",
    )
    if found.rewarded or found.gold_failed:
        rows = table("prompt", "answer", "reward", "parts", right=("reward",))
        for item in (*found.gold_failed, *found.rewarded)[:40]:
            parts = [f"{name} {value:.2f}" for name, value in item.parts.items() if value is not None]
            rows.add_row(quote(item.case), quote(item.name), f"{item.reward:.2f}", quote(", ".join(parts)))
        stdout.print(rows)
    for (metric, failure), answers in found.failures.items():
        has_reference = any(answer.name == GOLD for answer in answers)
        which = "of which a reference" if has_reference else "no reference"
        line = f"[yellow]{quote(metric)}[/] could not grade {plural(len(answers), 'answer')} ({which}): "
        print_line(stdout, line + quote(failure))
    reason = explain(found)
    if reason is None:
        print_line(stdout, "[green]the rewards hold[/]")
        return
    print_line(stdout, f"[red]the rewards do not hold[/]: {quote(reason.why)}")
    print_line(stdout, f"fix: {quote(reason.fix)}")
