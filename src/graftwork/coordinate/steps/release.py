"""Step: make a release of what the gate let through, and point the alias at it."""

from pathlib import Path

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.evaluate import Evaluated
from graftwork.coordinate.steps.prepare import Prepared
from graftwork.coordinate.workplace import Workplace, now, who
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict
from graftwork.registry.folder import release_folder
from graftwork.registry.promote import promote
from graftwork.registry.publish import publish


def _do(work: Workplace, made: Made) -> Release:
    outcome, dataset = made.get("train", TrainOutcome), made.get("prepare", Prepared).dataset
    alias = work.settings.release.alias
    release = publish(
        folder=work.project.releases,
        index=work.releases,
        project=work.settings.project,
        base=work.base.name,
        base_fingerprint=work.base.revision,
        template_fingerprint=dataset.template_fingerprint,
        adapter_folder=Path(outcome.adapter_folder),
        dataset=dataset,
        plan=made.get("plan", Plan),
        outcome=outcome,
        report=made.get("evaluate", Evaluated).report,
        verdict=made.get("gate", Verdict),
        parent=work.releases.aliases().get(alias),
        created_at=now(),
        settings=work.settings.model_dump(mode="json"),
        versions=outcome.versions,
    )
    promote(
        work.releases,
        release,
        alias=alias,
        who=who(),
        when=now(),
        why="the gate said deploy",
        require_verdict=work.settings.release.require_verdict,
    )
    return release


STEP = Step(
    name="release",
    title="release it",
    needs=("prepare", "plan", "train", "evaluate", "gate"),
    makes=Release,
    depends_on=lambda work, _made: work.settings.release.model_dump(mode="json"),
    do=_do,
    identity=lambda release: str(release.id),
    still_there=lambda work, release: release_folder(work.project.releases, release.id).is_dir(),
)
