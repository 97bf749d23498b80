import numpy as np
import pytest
from columns_in_memory import ColumnsInMemory
from data_rows import THINGS, make_row

from graftwork.data.dedup import questions
from graftwork.data.dedup.questions import SAME_MEANING, find_embedder
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import assign_splits
from graftwork.data.split.leakage import find_leaks
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import EnvironmentFailure
from graftwork.text.similarity import number_text

SETTINGS = DataSettings(validation=0.2, test=0.3)
OTHERS = [make_row(f"{thing} {thing}ing {thing}ed?") for thing in THINGS]


class BySubject:
    """Takes lines with the same last word for the same question, and knows how often it was asked."""

    def __init__(self):
        self.asked = []

    def embed(self, texts):
        self.asked += texts
        vectors = np.zeros((len(texts), 4096))
        for vector, text in zip(vectors, texts, strict=True):
            vector[number_text(text.split()[-1]) % 4096] = 1
        return vectors


def assign_group(*questions, embedder):
    rows = [*OTHERS, *(make_row(question) for question in questions)]
    columns = ColumnsInMemory(rows, settings=SETTINGS)
    return columns, assign_splits(columns, settings=SETTINGS, embedder=embedder)


def test_questions_that_mean_the_same_share_a_group_and_cannot_leak():
    asked = (
        "[1] A source.\nWhat do I pay for the bagpipe?",
        "How dear is this bagpipe?",
        "Who made the kazoo?",
    )
    columns, plain = assign_group(*asked, embedder=None)
    assert len(set(plain.group.tolist()[-3:])) == 3
    embedder = BySubject()
    columns, assignment = assign_group(*asked, embedder=embedder)
    groups = assignment.group.tolist()
    assert groups[-3] == groups[-2] != groups[-1]
    assert len(embedder.asked) == len(set(embedder.asked))
    kept = np.ones(columns.rows, dtype=bool)
    assert find_leaks(columns, assignment, kept, settings=SETTINGS, embedder=BySubject()) == []
    assignment.split[-3:-1] = (SPLITS.index("train"), SPLITS.index("test"))
    found = find_leaks(columns, assignment, kept, settings=SETTINGS, embedder=BySubject())
    assert [kind for *_, kind in found] == ["paraphrase"]


def test_rows_that_are_logged_later_move_no_row_by_what_they_mean():
    asked = [f"{verb} the {thing}?" for verb in ("Praise", "Tune", "Drop in") for thing in THINGS]
    _, all_of_them = assign_group(*asked, embedder=BySubject())
    _, some = assign_group(*asked[:20], embedder=BySubject())
    assert some.split.tolist() == all_of_them.split.tolist()[: len(some.split)]


@pytest.mark.parametrize(("most", "cut"), [(5, 20), (30, 40), (100, 0)])
def test_going_on_from_what_was_decided_gives_the_same_by_what_rows_mean(monkeypatch, most, cut):
    for module in ("dedup.questions", "split.assignment", "split.leakage"):
        monkeypatch.setattr(f"graftwork.data.{module}.MOST_EMBEDDED", most)
    asked = [f"{verb} the {thing}?" for verb in ("Praise", "Tune", "Drop in") for thing in THINGS]
    columns, again = assign_group(*asked, embedder=BySubject())
    _, before = assign_group(*asked[: max(0, cut - len(OTHERS))], embedder=BySubject())
    known = before._replace(kept=np.ones(len(before.split), dtype=bool))
    went_on = assign_splits(columns, settings=SETTINGS, embedder=BySubject(), earlier=known)
    assert went_on.split.tolist() == again.split.tolist()
    assert went_on.group.tolist() == again.group.tolist()
    kept = np.ones(columns.rows, dtype=bool)
    went_on.split[-1] = SPLITS.index("test") if went_on.split[-1] == 0 else 0
    found = find_leaks(columns, went_on, kept, settings=SETTINGS, embedder=BySubject(), earlier=known)
    assert found == find_leaks(columns, went_on, kept, settings=SETTINGS, embedder=BySubject())


ASKED_FOR = DataSettings(paraphrases="embedder")


def test_no_embedder_is_taken_that_was_not_asked_for():
    assert find_embedder(DataSettings()) is None


def test_an_embedder_that_is_asked_for_and_not_there_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(questions, "PACKAGE", "no_such_package_as_this")
    with pytest.raises(EnvironmentFailure) as caught:
        find_embedder(ASKED_FOR)
    assert "no_such_package_as_this" in caught.value.what
    assert "[paraphrases]" in caught.value.fix


def test_the_installed_embedder_distinguishes_a_paraphrase_from_another_subject():
    embedder = find_embedder(ASKED_FOR)
    one, same, other = embedder.embed(
        ["What does the resin printer cost?", "How much do you charge for the resin printer?", "Who are you?"]
    )
    assert one @ same >= SAME_MEANING > one @ other
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
