"""Step: publish what passed the gate, and point the alias of the model at it."""

from pathlib import Path

from graftwork.model.base import note_on_weights
from graftwork.pipeline.releases import full_alias, open_store
from graftwork.pipeline.step import Made, Step
from graftwork.pipeline.steps.evaluate import Evaluated
from graftwork.pipeline.steps.prepare import Prepared
from graftwork.pipeline.workplace import Workplace, now, who
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict
from graftwork.registry.aliases import Change, promote
from graftwork.registry.folder import MINISIGN
from graftwork.registry.manifest import Lineage, ReleaseContext
from graftwork.registry.publish import find_licence, publish
from graftwork.registry.signatures import load_secret_key, sign_manifest
from graftwork.registry.store import ReleaseStore
from graftwork.text.publish import publishable


def _do(work: Workplace, made: Made) -> Release:
    outcome, dataset = made.get("train", TrainOutcome), made.get("prepare", Prepared).dataset
    alias, store = full_alias(work), open_store(work)
    # Locked until the alias points at the release: until then garbage collection could remove it.
    with store.shared_lock():
        release = publish(
            store,
            work.releases,
            lineage=Lineage(
                dataset=dataset,
                plan=made.get("plan", Plan),
                outcome=outcome,
                report=made.get("evaluate", Evaluated).report,
                verdict=made.get("gate", Verdict),
            ),
            context=ReleaseContext(
                project=work.settings.project,
                base=work.base.name,
                base_fingerprint=work.base.revision,
                template_fingerprint=dataset.template_fingerprint,
                parent=work.releases.aliases().get(alias),
                created_at=now(),
                settings={**publishable(work.settings), **_note_on_base(work)},
                versions=outcome.versions,
                licence=find_licence(Path(work.base.folder)),
            ),
            adapter_folder=Path(outcome.adapter_folder),
        )
        _sign(work, store, release)
        store.verify(release.id)
        promote(
            work.releases,
            release,
            alias=alias,
            change=Change(who(), now(), "the gate said deploy"),
            require_verdict=work.settings.release.require_verdict,
        )
    return release


def _note_on_base(work: Workplace) -> dict[str, str]:
    note = note_on_weights(work.base.name)
    return {"base_weights": note} if note else {}


def _sign(work: Workplace, store: ReleaseStore, release: Release) -> None:
    given, folder = work.settings.release.signing_key, store.folder(release.id)
    if given and not (folder / MINISIGN).exists():
        key = load_secret_key((work.project.root / given).expanduser())
        store.sign(release.id, sign_manifest(folder, key=key, comment=f"release:{release.id} time:{now()}"))


STEP = Step(
    name="release",
    title="release it",
    needs=("prepare", "plan", "train", "evaluate", "gate"),
    makes=Release,
    # Retention settings do not make another release.
    depends_on=lambda work, _made: work.settings.release.model_dump(
        mode="json", exclude={"keep_last", "keep_days", "store"}
    ),
    do=_do,
    identity=lambda release: str(release.id),
    still_there=lambda work, release: ReleaseStore.open(work.project.releases).has(release.id),
)
