"""What a user may get wrong at a place is explained, and leaves nothing running and no reservation."""

import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from cloud_cases import CASES, open_case

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_drill import MemoryLedger
from fleet_samples import trial_bundle
from fleet_simulator import SimulatedProvider
from place_contract import order

from graftwork.fleet.control import Controller, OverCap, Safety
from graftwork.fleet.jobs import choose_offer
from graftwork.fleet.place import Refused, make_label
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import GraftError, NegativeResult

SAFETY = Safety(boot_seconds=600, reconcile_seconds=300, settle_seconds=240)
CAPS = CapSettings(job_usd=50, month_usd=500)
NO_CARD = "no such card"


class Certain(Random):
    """Faults happen as soon as they can."""

    def random(self):
        return 0.99


@pytest.fixture(params=sorted(CASES))
def case(request, tmp_path, monkeypatch):
    provider = SimulatedProvider(chance=Certain(1), jobs_only=True)
    with open_case(request.param, provider, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(params=["lambda", "runpod"])
def machines(request, tmp_path, monkeypatch):
    provider = SimulatedProvider(chance=Certain(1))
    with open_case(request.param, provider, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return trial_bundle(tmp_path_factory.mktemp("bundles"))[0]


@pytest.fixture
def ledger():
    return MemoryLedger()


def start(case, ledger, bundle, *, caps=CAPS, **changes):
    job_order = order(bundle, gpu=case.gpu, usd_per_hour=case.usd_per_hour, seconds=600.0)
    changes = {"label": make_label(ledger.key, job_order.job_id), **changes}
    controller = Controller(case.place(), ledger, SAFETY)
    return controller, controller.start(
        job_order.model_copy(update=changes), caps=caps, now=case.provider.now
    )


def explained(error):
    """What, a fix, and no name of a Python error."""
    assert isinstance(error, GraftError)
    assert error.what
    assert error.fix
    for text in (error.what, error.why, error.fix):
        assert "Traceback" not in text
        assert "KeyError" not in text
    return f"{error.what} {error.why} {error.fix}"


def nothing_is_left(case, ledger):
    """No machine, no open job: the next attempt is not refused because of this one."""
    assert case.provider.machines == []
    assert case.provider.billed_usd() == 0
    for job in ledger.list():
        assert job.state == "refused"
        assert job.reason
        assert job.counted_usd == 0


def test_a_card_that_the_place_does_not_have_is_named_with_those_it_has(case, ledger, bundle):
    with pytest.raises(NegativeResult, match=NO_CARD) as caught:
        choose_offer(case.place(), NO_CARD)
    assert case.gpu in explained(caught.value)
    with pytest.raises(GraftError) as refused:
        start(case, ledger, bundle, gpu=NO_CARD)
    assert NO_CARD in explained(refused.value)
    nothing_is_left(case, ledger)


def test_wrong_credentials_leave_no_reservation(case, ledger, bundle):
    with case.wrong_login(), pytest.raises(Refused) as caught:
        start(case, ledger, bundle)
    explained(caught.value)
    nothing_is_left(case, ledger)


def test_a_missing_quota_leaves_no_reservation(case, ledger, bundle):
    case.provider.faults = Counter({"quota": 1})
    with pytest.raises(Refused) as caught:
        start(case, ledger, bundle)
    assert "quota" in explained(caught.value)
    nothing_is_left(case, ledger)


def test_a_price_over_the_cap_is_refused_before_the_place_is_asked(case, ledger, bundle):
    if not case.usd_per_hour:
        return  # it costs nothing
    with pytest.raises(OverCap) as caught:
        start(case, ledger, bundle, caps=CapSettings(job_usd=0.01, month_usd=500))
    assert "fleet.caps.job_usd" in explained(caught.value)
    assert ledger.list() == ()
    assert case.api.creations == 0
    nothing_is_left(case, ledger)


def reconcile_until_closed(case, controller, ledger):
    for _ in range(8):
        case.provider.advance(SAFETY.reconcile_seconds)
        controller.reconcile(now=case.provider.now)
    (job,) = ledger.list()
    assert case.provider.alive() == ()
    assert job.state == "failed"
    return job


def delivering(case, controller, bundle):
    (job,) = controller.ledger.list()
    placed = order(bundle, gpu=case.gpu, usd_per_hour=case.usd_per_hour, seconds=600.0)
    placed = placed.model_copy(update={"label": job.label})
    controller.place = case.place()
    controller.deliver = lambda found: controller.place.deliver(placed, found.placed, secrets={})


def test_a_machine_without_python_is_given_back_with_the_reason(machines, ledger, bundle):
    machines.python = "/no/such/python"
    controller, _ = start(machines, ledger, bundle)
    machines.bring_up()
    delivering(machines, controller, bundle)
    reason = reconcile_until_closed(machines, controller, ledger).reason
    assert "there is no such Python" in reason


def test_a_machine_that_refuses_our_ssh_key_is_given_back_with_the_reason(machines, ledger, bundle):
    controller, _ = start(machines, ledger, bundle)
    machines.bring_up()
    machines.monkeypatch.setenv("GRAFT_SSH", "ssh -i /dev/null -o IdentitiesOnly=yes -o ControlPath=none")
    delivering(machines, controller, bundle)
    reason = reconcile_until_closed(machines, controller, ledger).reason
    assert "cannot be reached: " in reason
    assert "ermission denied" in reason


def test_a_public_key_that_is_not_there_is_explained_before_anything_is_rented(machines, ledger, bundle):
    if machines.place().name == "lambda":
        machines.api.keys = []
    else:
        (machines.root / "key.pub").unlink()
    with pytest.raises(GraftError, match="SSH key") as caught:
        start(machines, ledger, bundle)
    explained(caught.value)
    nothing_is_left(machines, ledger)


def test_a_storage_that_is_full_or_gone_leaves_no_reservation(case, ledger, bundle, monkeypatch):
    storage = getattr(case.place(), "_storage", None)
    if storage is None:
        return  # the files go to the machine itself, or by the provider's own upload

    def fill(*_words, **_options):
        raise OSError(28, "No space left on device")

    kind = type(storage)
    if hasattr(storage, "_files"):
        for method in ("pipe_file", "put_file"):
            monkeypatch.setattr(type(storage._files.system), method, fill)
        with pytest.raises(Refused, match="is full") as caught:
            start(case, ledger, bundle)
        assert "no job was made" in explained(caught.value)
        nothing_is_left(case, ledger)
    else:
        from graftwork.fleet.place import PlaceUnreachable

        def vanish(*_words, **_options):
            raise PlaceUnreachable("the bucket is not responding", fix="try again later")

        monkeypatch.setattr(kind, "write", vanish)
        with pytest.raises(Refused, match="could not be sent: the bucket is not responding") as caught:
            start(case, ledger, bundle)
        explained(caught.value)
        nothing_is_left(case, ledger)
