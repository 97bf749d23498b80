"""Training settings for one run that graft.yaml does not describe."""

from dataclasses import dataclass

import pytest

from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import UserError
from graftwork.train.all_models import with_train


@dataclass
class Project:
    settings: ProjectSettings


@dataclass
class Work:
    project: Project
    model: str

    @property
    def settings(self):
        return self.project.settings.of_model(self.model)


def make_work(train=None, models=None):
    content = {"project": "p", "base": "b", "data": {"logs": ["l"]}, "train": train or {}}
    settings = ProjectSettings.model_validate({**content, "models": models or {}})
    return Work(Project(settings), settings.main_model)


MODELS = {"main": {"train": {"rank": 4}}}


@pytest.mark.parametrize("models", [None, MODELS])
def test_changes_apply_to_the_model_that_is_worked_on(models):
    assert with_train(make_work(models=models), {"rank": 2}).settings.train.rank == 2


@pytest.mark.parametrize("models", [None, MODELS])
@pytest.mark.parametrize(
    ("train", "changes"),
    [({}, {"rank": 1024}), ({}, {"learning_rate": 2.0}), ({"strategy": "ddp"}, {"proximal": 0.1})],
)
def test_impossible_settings_are_a_mistake_with_its_reason(models, train, changes):
    with pytest.raises(UserError, match="not possible") as mistake:
        with_train(make_work(train, models), changes)
    assert next(iter(changes)) in mistake.value.why
    assert mistake.value.where == "train"
