"""Step: look at the logs before anything is made of them."""

from graftwork.pipeline.pace import tell_pace
from graftwork.pipeline.sight import load_template, see
from graftwork.pipeline.step import Made, Step
from graftwork.pipeline.steps.logs import log_hashes
from graftwork.pipeline.workplace import Workplace, tell_note_on_base
from graftwork.records.audit import Audit


def _do(work: Workplace, _made: Made) -> Audit:
    from graftwork.data.audit import audit

    tell_note_on_base(work)
    return audit(
        see(work, template=load_template(work)),
        folder=work.project.sifted,
        root=work.project.root,
        on_progress=tell_pace(work.reporter),
    )


STEP = Step(
    name="audit",
    title="audit the logs",
    needs=(),
    makes=Audit,
    depends_on=lambda work, _made: [
        work.settings.data.to_manifest(),
        log_hashes(work),
        work.settings.base,
        work.base.revision,
    ],
    do=_do,
    input_names=("data", "log file", "base", "weights of the base"),
)
