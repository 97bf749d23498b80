"""`graft release make`: from whatever is there to a release of one model."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model


def make(model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Release a model: what is out of date is brought up to date, the gate decides, the alias moves.

    Example:  graft release make --model tagger
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.cli.steps import run_upto
    from graftwork.records.errors import AnswerIsNo
    from graftwork.records.verdict import Verdict

    made = run_upto("release", project=project, model=model)
    release = made.outputs.get("release")
    if release is None:
        verdict = made.get("gate", Verdict)
        raise AnswerIsNo(
            "nothing was released",
            why=f"the gate said {verdict.decision.replace('_', ' ')}: {verdict.reason}",
            fix="`graft gate` shows each rule and what would help",
        )
    print_json(release) if json else show(stdout, release)
