"""Step: look at the logs before anything is made of them."""

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.logs import log_hashes
from graftwork.coordinate.workplace import Workplace
from graftwork.data.audit import audit
from graftwork.records.audit import Audit


def _do(work: Workplace, _made: Made) -> Audit:
    return audit(work.settings.data.logs, settings=work.settings.data, root=work.project.root)


STEP = Step(
    name="audit",
    title="audit the logs",
    needs=(),
    makes=Audit,
    depends_on=lambda work, _made: [work.settings.data.model_dump(mode="json"), log_hashes(work)],
    do=_do,
)
