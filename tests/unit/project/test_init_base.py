"""The base that `graft init` settles on where the proposed one cannot be fetched."""

import pytest

from graftwork.model.base import EMBEDDED
from graftwork.plan.bases import BaseNeed
from graftwork.plan.fit.project import named_machine
from graftwork.project import init
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError

GPU = named_machine(gpu="RTX 4090", ram_gib=64)


def need(**changes) -> BaseNeed:
    return BaseNeed(
        task="json",
        language="en",
        rows=300,
        epochs=2,
        batch_size=8,
        rank=16,
        upper_layers=None,
        method="lora",
        **{"lengths": (80, 120, 200), **changes},
    )


@pytest.fixture(params=[EnvironmentFailure("the Hub did not answer"), UserError("there is no base model")])
def unreachable(request, monkeypatch):
    def find_base(*_, **__):
        raise request.param

    monkeypatch.setattr(init, "find_base", find_base)


@pytest.mark.usefixtures("unreachable")
def test_a_proposed_base_that_cannot_be_fetched_leaves_the_embedded_one(tmp_path):
    base, proposal = init._settle_base(None, need(), GPU, tmp_path)
    assert (base, proposal.option.base) == (EMBEDDED, EMBEDDED)
    assert "was not fetched" in proposal.why


@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize("asked", [{"license": "llama3.2"}, {"lengths": (20_000,) * 10}])
def test_the_embedded_base_does_not_stand_in_where_it_is_refused_itself(tmp_path, asked):
    with pytest.raises(GraftError):
        init._settle_base(None, need(**asked), GPU, tmp_path)
