"""The router of a family: trained from prepared datasets, measured on their test split, read back checked."""

import json

import pytest

from graftwork.api.project import open_project
from graftwork.files.safetensors import read_router, router_path
from graftwork.records.errors import Corrupted, UserError
from graftwork.serve.project import open_family
from graftwork.serve.settings import FamilySettings, ServeSettings

NOUNS = {"storage": ("disk", "archive", "folder"), "people": ("user", "customer", "reviewer")}


def write_project(folder, *, models="storage: {keep: {role: [storage]}}, people: {keep: {role: [people]}}"):
    rows = []
    for role, nouns in NOUNS.items():
        for number in range(60):
            noun = nouns[number % 3]
            question = f"Case {number} of {role}: what about the {noun} with the number {number * 7}?"
            rows.append(
                {
                    "messages": [
                        {"role": "system", "content": f"You are {role}."},
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": f"The {noun} {number} is settled by rule {number}."},
                    ],
                    "role": role,
                    "session": f"{role}-{number}",
                }
            )
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "graft.yaml").write_text(
        "project: family\nbase: smollm2-135m-instruct\n"
        "data: {logs: [log.jsonl], validation: 0.2, test: 0.3}\n"
        f"models: {{main: {{}}, {models}}}\n"
    )
    return open_project(folder)


def test_a_router_is_measured_on_the_test_split_and_read_back_equal(tmp_path):
    project = write_project(tmp_path)
    trained = project.train_router()
    assert trained.card.labels == ("people", "storage")
    assert trained.card.accuracy.n == sum(sum(found.values()) for found in trained.card.confusion.values())
    assert trained.card.accuracy.value == 1.0
    assert trained.card.accuracy.low < 1.0 <= trained.card.accuracy.high
    classifier, card = read_router(router_path(project.folder.state))
    assert card == trained.card
    assert classifier.predict("what about the archive with the number 3?").likeliest == "storage"
    assert project.train_router().card.id == card.id

    with project.open() as work:
        family = open_family(work, ServeSettings(family=FamilySettings()))
    assert family.aliases == {"main": "champion", "storage": "storage/champion", "people": "people/champion"}
    assert family.router is not None

    path = router_path(project.folder.state)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Corrupted, match="is not a router"):
        read_router(path)


def test_a_family_without_rows_of_their_own_is_refused(tmp_path):
    project = write_project(tmp_path, models="all: {keep: {role: [people, storage]}}")
    with pytest.raises(UserError, match="at least two models") as refused:
        project.train_router()
    assert "keep" in refused.value.fix
