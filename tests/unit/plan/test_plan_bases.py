"""Bases of the catalog, and the choice among them by task, machine, minutes, license and language."""

import pytest

from graftwork.model.base import EMBEDDED
from graftwork.model.shape import total_parameters
from graftwork.plan.bases import BaseNeed, choose_base, plan_base, refuse_unless_it_fits
from graftwork.plan.catalog.bases import find_base_row, list_bases, model_of, name_in_settings
from graftwork.plan.catalog.models import find_model
from graftwork.plan.fit.project import named_machine
from graftwork.records.errors import UserError

CPU = named_machine(cpu="Ryzen 9950X", ram_gib=16)
GPU = named_machine(gpu="RTX 4090", ram_gib=64)


def need(**changes) -> BaseNeed:
    usual = {
        "task": "json",
        "language": "en",
        "lengths": (80, 120, 200),
        "rows": 300,
        "epochs": 2,
        "batch_size": 8,
        "rank": 16,
        "upper_layers": None,
        "method": "lora",
    }
    return BaseNeed.model_validate({**usual, **changes})


def test_every_base_has_sizes_and_is_found_by_each_of_its_names():
    bases = list_bases()
    assert 8 <= len(bases) <= 12
    for base in bases:
        model = model_of(base)
        assert find_base_row(model.name) == find_base_row(model.hf_id) == base
        assert all((base.good_for, base.not_for, base.languages))
    assert find_base_row(EMBEDDED) == find_base_row("smollm2-135m")
    assert find_base_row("Qwen/Qwen2.5-32B-Instruct") is None


@pytest.mark.parametrize("task", ["json", "tools", "code", "text"])
def test_a_gpu_gets_the_fastest_base_that_is_good_for_the_task(task):
    proposal = choose_base(need(task=task), GPU)
    assert proposal.option.grade == "good"
    good = [o for o in proposal.options if o.grade == "good" and o.refused is None]
    assert proposal.option.minutes.value == min(option.minutes.value for option in good)


def test_few_minutes_on_a_cpu_leave_the_embedded_base_and_name_the_better_one():
    proposal = choose_base(need(minutes=3), CPU)
    assert proposal.option.base == EMBEDDED
    assert "is good for it and would take" in proposal.why
    assert choose_base(need(minutes=10_000), CPU).option.grade == "good"


def test_rows_beyond_the_context_rule_a_base_out():
    proposal = choose_base(need(lengths=(20_000,) * 10), GPU)
    assert {o.name for o in proposal.options if o.refused == "context"} >= {"smollm2-135m", "smollm2-360m"}
    assert proposal.option.context >= 20_000


def test_bases_with_terms_of_their_own_are_proposed_only_where_the_license_is_named():
    assert choose_base(need(task="text"), GPU).option.terms == ""
    assert choose_base(need(license="llama3.2"), GPU).option.license == "llama3.2"


def test_a_language_that_a_base_was_not_made_for_counts_as_poor():
    proposal = choose_base(need(language="nl"), GPU)
    notes = {option.name: option for option in proposal.options}
    assert notes["smollm2-135m"].grade == "poor"
    assert "not made for Dutch" in notes["smollm2-135m"].note
    assert "nl" in find_base_row(proposal.chosen).languages


def test_a_base_that_does_not_fit_is_refused_with_the_largest_that_does():
    with pytest.raises(UserError, match="does not fit") as refused:
        refuse_unless_it_fits(find_model("qwen2.5-32b"), need(), CPU)
    largest = max(
        (base for base in list_bases() if plan_base(model_of(base), need(), CPU).fits),
        key=lambda base: total_parameters(model_of(base).shape),
    )
    assert f"--base {name_in_settings(model_of(largest))} " in refused.value.fix
    assert "GiB are lacking" in refused.value.why


ROW = "{name},mit,,good,{tools},fair,fair,en,labels,code,a team,2026-11-19"
"""A row of a team's own bases.csv."""


def write_bases(folder, **cells):
    header = "name,license,terms,json,tools,code,text,languages,good_for,not_for,source,dated"
    (folder / "bases.csv").write_text(f"{header}\n{ROW.format(**{'tools': 'fair', **cells})}\n")
    return folder


def test_a_teams_own_base_is_found_however_it_writes_the_name(tmp_path):
    overlay = write_bases(tmp_path, name="Qwen3 0.6B")
    base = find_base_row("qwen3-0.6b", overlay=overlay)
    assert (base.name, base.license) == ("Qwen3 0.6B", "mit")
    assert model_of(base, overlay=overlay).name == "qwen3-0.6b"
    assert choose_base(need(license="mit"), GPU, overlay=overlay).chosen == base.name


def test_a_teams_own_base_without_sizes_is_a_mistake_that_names_the_table(tmp_path):
    overlay = write_bases(tmp_path, name="qwen3-0.6")
    with pytest.raises(UserError, match=r"no model 'qwen3-0\.6'") as refused:
        choose_base(need(), GPU, overlay=overlay)
    assert "qwen3-0.6b" in refused.value.fix
    assert "models.csv" in refused.value.fix


def test_a_grade_that_does_not_exist_is_named_with_its_column(tmp_path):
    with pytest.raises(UserError, match="`tools` must be one of good, fair, poor, and is 'great'"):
        list_bases(overlay=write_bases(tmp_path, name="qwen3-0.6b", tools="great"))
