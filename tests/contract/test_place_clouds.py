"""Cloud places keep one contract, each with the provider's own client against a stateful stand-in."""

import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from cloud_cases import CASES, open_case
from cloud_server import Request
from lambda_server import KEY, LambdaStandIn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_drill import MemoryLedger, run_drill
from fleet_samples import trial_bundle
from fleet_simulator import CARD, FAULTS, SimulatedPlace, SimulatedProvider
from place_contract import order

from graftwork.fleet.control import Controller, OverCap, Safety
from graftwork.fleet.jobs import FleetRequest, choose_offer, quote_run
from graftwork.fleet.place import PlaceUnreachable, Refused, make_label
from graftwork.fleet.places import CLOUDS
from graftwork.fleet.places.lambda_cloud import LambdaClient, LambdaPlace, LambdaSettings
from graftwork.fleet.places.rented import RentedPlace
from graftwork.fleet.settings import CapSettings, FleetSettings
from graftwork.records.errors import EnvironmentFailure, GraftError, NegativeResult

SECRET = "hf_s3cr3tvalue"
SAFETY = Safety(boot_seconds=600, reconcile_seconds=300, settle_seconds=240)
CAPS = CapSettings(job_usd=50, month_usd=500)


class Certain(Random):
    """Faults happen as soon as they can."""

    def random(self):
        return 0.99


# The whole contract in `make test`: jobs that the provider runs, and machines that are rented.
WHOLE = ("kaggle", "lambda")
at_every_cloud = pytest.mark.parametrize("case", sorted(CASES), indirect=True)


@pytest.fixture(
    params=[name if name in WHOLE else pytest.param(name, marks=pytest.mark.slow) for name in sorted(CASES)]
)
def case(request, tmp_path, monkeypatch):
    with open_case(
        request.param, SimulatedProvider(chance=Certain(1), jobs_only=True), tmp_path, monkeypatch
    ) as found:
        yield found


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    root = tmp_path_factory.mktemp("bundles")
    return {
        "short": trial_bundle(root)[0],
        # It is stopped, and must not end before, however long that takes.
        "long": trial_bundle(root, job={"steps": 50_000, "step_seconds": 0.02})[0],
    }


def ordered(case, bundle, number=1):
    return order(bundle, number, gpu=case.gpu, usd_per_hour=case.usd_per_hour, seconds=600.0)


def test_every_cloud_has_a_section_a_page_and_a_case():
    pages = Path(__file__).parents[2] / "docs" / "places"
    assert CASES.keys() == CLOUDS.keys()
    for name, cloud in CLOUDS.items():
        assert (cloud.section or name) in FleetSettings.model_fields
        assert (pages / f"{name}.md").exists()


@at_every_cloud
def test_a_job_runs_once_and_its_result_is_fetched(case, bundles, tmp_path):
    place, job_order = case.place(), ordered(case, bundles["short"])
    job = place.submit(job_order, secrets={"HF_TOKEN": SECRET})
    assert (job.place, job.label) == (place.name, job_order.label)
    assert place.poll(job).phase == "starting"
    assert [found.label for found in place.list()] == [job.label]
    # The same label is the same job.
    assert place.submit(job_order, secrets={}).label == job.label
    assert case.api.creations == 1
    case.run(job.label)
    assert case.sent_bytes(place) > 0
    # Another process knows only what the ledger holds.
    place = case.place()
    found = place.poll(job)
    assert (found.phase, found.exit_code) == ("ended", 0), case.api.output(job.label)
    place.fetch(job, tmp_path / "run")
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["adapter_folder"] == str(tmp_path / "run" / "adapter")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert SECRET not in place.log(job)
    case.give_back(place, job)
    assert place.list() == ()
    place.submit(ordered(case, bundles["short"], 2), secrets={})
    assert place.sent_bytes == 0 or not case.keeps_files
    secrets_are_nowhere(case, tmp_path, bundles["short"])


def secrets_are_nowhere(case, *folders):
    """Secrets are only where the provider keeps them."""
    for raw in case.api.raw:
        assert SECRET.encode() not in raw or case.may_hold_secret(raw), raw[:300]
    for folder in folders:
        for path in folder.rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_job_is_stopped_in_order_and_its_checkpoint_fetched(case, bundles, tmp_path):
    place = case.place()
    job = place.submit(ordered(case, bundles["long"]), secrets={})
    case.run_and_stop(place, job)
    place = case.place()
    found = place.poll(job)
    assert (found.phase, found.exit_code) == ("ended", 75), case.api.output(job.label)
    assert "stopped" in found.message
    place.fetch(job, tmp_path / "run")
    assert not (tmp_path / "run" / "outcome.json").exists()
    if not case.stops_by_flag:
        assert list((tmp_path / "run" / "checkpoints").iterdir())
    case.give_back(place, job)
    assert place.list() == ()
    place.stop(job)  # nothing is left to stop


def test_a_job_that_is_ended_at_once_is_no_longer_listed(case, bundles):
    place = case.place()
    job = place.submit(ordered(case, bundles["short"]), secrets={})
    case.provider.advance(120)
    place.stop(job, at_once=True)
    assert place.list() == ()
    assert case.provider.alive() == ()
    place.stop(job, at_once=True)


def test_a_job_that_does_not_exist_is_gone_and_cannot_be_fetched(case, tmp_path):
    place = case.place()
    job = case.unknown_job()
    assert place.poll(job).phase == "gone"
    assert place.log(job) == ""
    with pytest.raises(EnvironmentFailure, match="does not have the job"):
        place.fetch(job, tmp_path / "run")


def test_offers_have_a_price_a_source_and_a_date(case):
    offers = case.place().offer()
    assert case.gpu in {offer.gpu for offer in offers}
    for offer in offers:
        assert offer.source
        assert offer.dated
        assert offer.usd_per_hour is not None


def test_a_job_ordered_by_instance_type_goes_on_with_its_card(case, bundles):
    place = case.place()
    offer = next(offer for offer in place.offer() if offer.gpu == case.gpu)
    named = offer.instance or offer.gpu
    work = SimpleNamespace(settings=SimpleNamespace(fleet=FleetSettings()))
    plan = SimpleNamespace(minutes=SimpleNamespace(high=60.0), device=SimpleNamespace(name="a card"))
    quote = quote_run(work, plan, FleetRequest(place.name, gpu=named), choose_offer(place, named))
    assert (quote.gpu, quote.instance) == (offer.gpu, offer.instance)
    controller = Controller(place, MemoryLedger(), SAFETY)
    job_order = ordered(case, bundles["short"]).model_copy(
        update={"gpu": quote.gpu, "instance": quote.instance}
    )
    controller.start(job_order, caps=CAPS, now=case.provider.now)
    case.provider.advance(120)
    controller.reconcile(now=case.provider.now)
    assert [job.state for job in controller.ledger.list()] == ["submitted"]


def test_kaggle_without_a_login_is_explained_before_anything_is_asked(tmp_path, monkeypatch):
    with open_case("kaggle", SimulatedProvider(), tmp_path, monkeypatch) as found:
        monkeypatch.delenv("KAGGLE_KEY")
        with pytest.raises(Refused, match="no login for Kaggle") as caught:
            found.place().offer()
        assert "KAGGLE_API_TOKEN" in caught.value.fix
        assert found.api.raw == []


def test_a_public_repository_of_hugging_face_gets_no_files(tmp_path, monkeypatch, bundles):
    with open_case("huggingface", SimulatedProvider(), tmp_path, monkeypatch) as found:
        found.api.files, found.api.private = {}, False
        with pytest.raises(Refused, match="me/jobs is public") as caught:
            found.place().submit(ordered(found, bundles["short"]), secrets={})
        assert "private" in caught.value.fix
        assert found.api.files == {}
        assert found.provider.machines == []


@pytest.mark.parametrize("goes", ["stopped", "gone"])
def test_sagemaker_keeps_no_secrets_of_a_job_that_is_over(goes, tmp_path, monkeypatch, bundles):
    with open_case("sagemaker", SimulatedProvider(jobs_only=True), tmp_path, monkeypatch) as found:
        place = found.place()
        job = place.submit(ordered(found, bundles["short"]), secrets={"HF_TOKEN": SECRET})
        assert found.api.secrets
        if goes == "stopped":
            place.stop(job, at_once=True)
        else:
            found.provider.machines.clear()
            assert place.poll(job).phase == "gone"
        assert found.api.secrets == {}


@pytest.mark.parametrize("name", ["azureml", "sagemaker"])
def test_a_create_call_that_fails_unseen_leaves_no_secrets(name, tmp_path, monkeypatch, bundles):
    with open_case(name, SimulatedProvider(jobs_only=True), tmp_path, monkeypatch) as found:
        ledger = MemoryLedger()
        controller = Controller(found.place(), ledger, SAFETY)
        job_order = ordered(found, bundles["short"])
        job_order = job_order.model_copy(update={"label": make_label(ledger.key, job_order.job_id)})

        def fail(*_given, **_more):
            raise PlaceUnreachable("no answer")

        monkeypatch.setattr(found.provider, "create", fail)
        secrets = {"HF_TOKEN": SECRET}
        with pytest.raises(PlaceUnreachable):
            controller.start(job_order, caps=CAPS, now=found.provider.now, secrets=secrets)
        assert found.api.secrets
        # Another process, which knows only the ledger.
        controller = Controller(found.place(), ledger, SAFETY)
        found.provider.advance(SAFETY.settle_seconds + 1)
        controller.reconcile(now=found.provider.now)
        assert [job.state for job in ledger.list()] == ["failed"]
        assert found.api.secrets == {}


def test_lambda_without_the_ssh_key_is_explained_and_nothing_is_launched(tmp_path, monkeypatch, bundles):
    with open_case("lambda", SimulatedProvider(), tmp_path, monkeypatch) as found:
        found.api.keys = [{"id": "1", "name": "of another person", "public_key": "ssh-rsa AAAA x"}]
        with pytest.raises(Refused, match="does not have the SSH key") as caught:
            found.place().submit(ordered(found, bundles["short"]), secrets={})
        assert "of another person" in caught.value.why
        assert found.api.creations == 0


def test_a_machine_of_lambda_that_fails_is_given_back_before_its_limit(tmp_path, monkeypatch, bundles):
    with open_case("lambda", SimulatedProvider(chance=Certain(1)), tmp_path, monkeypatch) as found:
        place, ledger = found.place(), MemoryLedger()
        controller = Controller(place, ledger, SAFETY)
        controller.collect = lambda job: place.fetch(job.placed, tmp_path / "run")
        job_order = ordered(found, bundles["short"])
        job_order = job_order.model_copy(update={"label": make_label(ledger.key, job_order.job_id)})
        controller.start(job_order, caps=CAPS, now=found.provider.now)
        found.provider.advance(120)
        found.api.status = "unhealthy"
        controller.reconcile(now=found.provider.now)
        assert found.provider.alive() == ()
        (job,) = ledger.list()
        assert (job.outcome, job.reason) == ("failed", "the instance is unhealthy")


def test_lambda_offers_machines_with_one_card_that_a_region_has(tmp_path, monkeypatch):
    with open_case("lambda", SimulatedProvider(), tmp_path, monkeypatch) as found:
        offers = {offer.instance: offer for offer in found.place().offer()}
        assert sorted(offers) == ["gpu_1x_rtx3090", "gpu_1x_rtx4090"]
        assert offers["gpu_1x_rtx4090"].region == "us-east-1"
        monkeypatch.setattr(found.api, "types", dict)
        with pytest.raises(Refused, match="no machine with the GPU"):
            found.place().submit(ordered(found, ""), secrets={})


def test_the_job_of_azure_has_low_priority_a_limit_and_nothing_of_this_folder(tmp_path, monkeypatch, bundles):
    with open_case("azureml", SimulatedProvider(), tmp_path, monkeypatch) as found:
        place = found.place()
        job = place.submit(ordered(found, bundles["short"]), secrets={"HF_TOKEN": SECRET})
        (body,) = found.api.jobs.values()
        assert body["queueSettings"] == {"jobTier": "Spot"}
        assert body["limits"]["timeout"] == "PT20M"
        # Branch and commit of the folder that the command was given in are no business of Azure.
        assert set(body["properties"].values()) == {""}
        assert body["environmentVariables"] == {}
        assert found.api.secrets
        place.stop(job, at_once=True)
        assert found.api.secrets == {}


def test_the_states_of_a_job_at_azure_are_understood(tmp_path, monkeypatch, bundles):
    with open_case("azureml", SimulatedProvider(jobs_only=True), tmp_path, monkeypatch) as found:
        place = found.place()
        job = place.submit(ordered(found, bundles["short"]), secrets={})
        found.provider.advance(120)
        assert place.poll(job).phase == "running"
        assert [entry.label for entry in place.list()] == [job.label]
        place.stop(job, at_once=True)
        assert (place.poll(job).phase, place.list()) == ("ended", ())


def test_a_job_at_kaggle_ends_before_the_quota_does(tmp_path, monkeypatch):
    with open_case("kaggle", SimulatedProvider(), tmp_path, monkeypatch) as found:
        longest = {}
        for hours in (30, 5, 0.1):
            found.api.quota_seconds = int(hours * 3600)
            longest[hours] = found.place().offer()[0].longest_hours
        assert longest == {30: 11.75, 5: 4.75, 0.1: 0.0}


@at_every_cloud
def test_a_provider_that_does_not_answer_is_unreachable(case):
    with case.no_network(), pytest.raises(PlaceUnreachable):
        case.place().list()


@pytest.mark.parametrize(
    "faults",
    [
        {"create after the timeout": 1, "never boots": 2},
        {"duplicate": 1, "stop ignored": 2, "list lags": 2},
        {"server error": 3, "throttled": 2, "preempted": 1},
        {"other card": 1, "price rises": 1, "clock skew": 1},
    ],
    ids=" and ".join,
)
def test_nothing_is_left_running_whatever_the_provider_does(case, bundles, faults):
    ledger = MemoryLedger()
    controller = Controller(case.place(), ledger, SAFETY)
    case.provider.faults = Counter(faults)
    for number in range(1, 9):
        if len(ledger.list()) > 1 and case.provider.machines:
            break
        try:
            job_order = ordered(case, bundles["short"], number).model_copy(update={"run_id": f"run{number}"})
            controller.start(job_order, caps=CAPS, now=case.provider.now)
        except GraftError:
            continue
    for round_ in range(20):
        if round_ == 12 and not case.place().paid:
            # Waiting costs nothing, and may take as long as it takes: a person gives up.
            for job in ledger.list():
                controller.stop(job, now=case.provider.now, at_once=True)
        case.provider.advance(SAFETY.reconcile_seconds)
        controller.reconcile(now=case.provider.now)
    assert case.provider.machines
    assert not [job.id for job in ledger.list() if job.is_open]
    assert all(job.reason for job in ledger.list())
    assert controller.place.list() == ()
    assert case.provider.alive() == ()
    for job in ledger.list():
        assert job.actual_usd <= job.committed_usd + 1e-9


@at_every_cloud
def test_a_missing_client_names_its_extra(case, monkeypatch):
    if not case.library:
        return  # a program, not a package
    for name in list(sys.modules):
        if name.split(".")[0] == case.library:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, case.library, None)
    with pytest.raises(EnvironmentFailure, match="is not installed") as caught:
        case.place().list()
    assert f"[{case.extra}]" in caught.value.fix


def drill_at(name, seed, bundle, folder, monkeypatch):
    """The drill with the provider's own client between the controller and the simulated provider."""
    # The other providers state no price: it is a fact of the catalog or of graft.yaml.
    states_price = ("huggingface", "lambda", "runpod")
    kinds = tuple(kind for kind in FAULTS if kind != "price rises" or name in states_price)
    # Waiting costs nothing at Kaggle, and may take as long as it takes.
    kinds = tuple(kind for kind in kinds if kind != "never boots" or name != "kaggle")
    with ExitStack() as stack:

        def open_place(provider):
            case = stack.enter_context(open_case(name, provider, folder, monkeypatch))
            return WithBundle(case.place(), bundle, case)

        rents = "machines" if name in ("lambda", "runpod") else "jobs"
        return run_drill(seed, rents=rents, kinds=kinds, open_place=open_place)


@pytest.mark.parametrize("name", ["lambda", "runpod"])
def test_a_random_schedule_of_faults_and_crashes_leaks_nothing_at_rented_machines(
    name, tmp_path, monkeypatch, bundles
):
    outcome = drill_at(name, 3, bundles["short"], tmp_path, monkeypatch)
    assert outcome.is_clean, outcome
    assert outcome.jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_random_schedules_of_faults_and_crashes_leak_nothing_at_a_provider(
    name, tmp_path, monkeypatch, bundles
):
    for seed in range(20):
        outcome = drill_at(name, seed, bundles["short"], tmp_path / str(seed), monkeypatch)
        assert outcome.is_clean, outcome
        assert outcome.jobs


@pytest.mark.slow
def test_a_thousand_random_schedules_leak_nothing_at_rented_machines(tmp_path, monkeypatch, bundles):
    """Without sockets: the client of Lambda hands its requests to the stand-in."""
    for seed in range(1000):
        outcome = drill_in_process(seed, bundles["short"], tmp_path / str(seed))
        assert outcome.is_clean, outcome


def drill_in_process(seed, bundle, folder):
    def open_place(provider):
        api = LambdaStandIn(provider, folder)

        class DirectClient(LambdaClient):
            def _send(self, method, path, body):
                raw = json.dumps(body).encode() if body is not None else b""
                headers = {"Authorization": f"Bearer {self._key}"}
                found = api.decide(Request(method, path, {}, headers, raw))
                return found.status, json.dumps(found.content).encode(), None

        client = DirectClient(KEY, base_url="", wait=lambda _seconds: None)
        place = LambdaPlace(LambdaSettings(ssh_key="mine"), state=folder, client=client)
        return WithBundle(place, bundle, SimpleNamespace(api=api, provider=provider))

    return run_drill(seed, rents="machines", open_place=open_place)


class WithBundle:
    """A place whose orders get a bundle: those of a drill have none. Nothing is really run."""

    def __init__(self, place, bundle, case):
        self._place, self._bundle = place, str(bundle)
        if isinstance(place, RentedPlace):
            # What runs on the machine is simulated, and answers as unreliably as the provider.
            on_machine = SimulatedPlace(case.provider)
            place._host_of = lambda machine: on_machine if machine.address else None
            case.api.has_address = True

    def __getattr__(self, name):
        return getattr(self._place, name)

    def submit(self, job_order, *, secrets):
        return self._place.submit(job_order.model_copy(update={"bundle": self._bundle}), secrets=secrets)

    def offer(self):
        return tuple(offer for offer in self._place.offer() if offer.gpu == CARD)


# What a user may get wrong is explained, and leaves nothing running and no reservation.

NO_CARD = "no such card"


@pytest.fixture(params=["lambda", pytest.param("runpod", marks=pytest.mark.slow)])
def machines(request, tmp_path, monkeypatch):
    provider = SimulatedProvider(chance=Certain(1))
    with open_case(request.param, provider, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def ledger():
    return MemoryLedger()


def start(case, ledger, bundles, *, caps=CAPS, **changes):
    job_order = ordered(case, bundles["short"])
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


def test_a_card_that_the_place_does_not_have_is_named_with_those_it_has(case, ledger, bundles):
    with pytest.raises(NegativeResult, match=NO_CARD) as caught:
        choose_offer(case.place(), NO_CARD)
    assert case.gpu in explained(caught.value)
    with pytest.raises(GraftError) as refused:
        start(case, ledger, bundles, gpu=NO_CARD)
    assert NO_CARD in explained(refused.value)
    nothing_is_left(case, ledger)


@at_every_cloud
def test_wrong_credentials_are_explained_and_leave_no_reservation(case, ledger, bundles):
    with case.wrong_login():
        for ask in (lambda: case.place().list(), lambda: start(case, ledger, bundles)):
            with pytest.raises(Refused) as caught:
                ask()
            assert SECRET not in explained(caught.value)
    nothing_is_left(case, ledger)


def test_a_missing_quota_leaves_no_reservation(case, ledger, bundles):
    case.provider.faults = Counter({"quota": 1})
    with pytest.raises(Refused) as caught:
        start(case, ledger, bundles)
    assert "quota" in explained(caught.value)
    nothing_is_left(case, ledger)


def test_a_price_over_the_cap_is_refused_before_the_place_is_asked(case, ledger, bundles):
    if not case.usd_per_hour:
        return  # it costs nothing
    with pytest.raises(OverCap) as caught:
        start(case, ledger, bundles, caps=CapSettings(job_usd=0.01, month_usd=500))
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


def delivering(case, controller, bundles):
    (job,) = controller.ledger.list()
    placed = ordered(case, bundles["short"]).model_copy(update={"label": job.label})
    controller.place = case.place()
    controller.deliver = lambda found: controller.place.deliver(placed, found.placed, secrets={})


def test_a_machine_without_python_is_given_back_with_the_reason(machines, ledger, bundles):
    machines.python = "/no/such/python"
    controller, _ = start(machines, ledger, bundles)
    machines.bring_up()
    delivering(machines, controller, bundles)
    reason = reconcile_until_closed(machines, controller, ledger).reason
    assert "there is no such Python" in reason


def test_a_machine_that_refuses_our_ssh_key_is_given_back_with_the_reason(machines, ledger, bundles):
    controller, _ = start(machines, ledger, bundles)
    machines.bring_up()
    machines.monkeypatch.setenv("GRAFT_SSH", "ssh -i /dev/null -o IdentitiesOnly=yes -o ControlPath=none")
    delivering(machines, controller, bundles)
    reason = reconcile_until_closed(machines, controller, ledger).reason
    assert "cannot be reached: " in reason
    assert "ermission denied" in reason


def test_a_public_key_that_is_not_there_is_explained_before_anything_is_rented(machines, ledger, bundles):
    if machines.place().name == "lambda":
        machines.api.keys = []
    else:
        (machines.root / "key.pub").unlink()
    with pytest.raises(GraftError, match="SSH key") as caught:
        start(machines, ledger, bundles)
    explained(caught.value)
    nothing_is_left(machines, ledger)


def test_a_storage_that_is_full_or_gone_leaves_no_reservation(case, ledger, bundles, monkeypatch):
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
            start(case, ledger, bundles)
        assert "no job was created" in explained(caught.value)
        nothing_is_left(case, ledger)
    else:

        def vanish(*_words, **_options):
            raise PlaceUnreachable("the bucket is not responding", fix="try again later")

        monkeypatch.setattr(kind, "write", vanish)
        with pytest.raises(Refused, match="could not be sent: the bucket is not responding") as caught:
            start(case, ledger, bundles)
        explained(caught.value)
        nothing_is_left(case, ledger)
