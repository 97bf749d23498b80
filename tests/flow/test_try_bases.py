"""`graft run --quick --base A --base B`: bases are compared on the same rows and cases."""

import json
import shutil

import pytest
from flows import graft, opened

from graftwork.files.dataset import read_rows
from graftwork.pipeline.try_bases import compare_bases
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError


@pytest.fixture
def other_base(tiny_base, tmp_path):
    """The tiny base under another name, with other weights and a license."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "other"
    shutil.copytree(tiny_base, folder, ignore=shutil.ignore_patterns("graftwork.json"))
    weights = load_file(folder / "model.safetensors")
    changed = {name: tensor.flip(0).contiguous() for name, tensor in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


class Interrupted(NullReporter):
    """Ends the process, as far as this test can, once the first base was evaluated."""

    def finished(self, step, output, seconds):
        if step == "evaluate":
            raise SystemExit(137)


def test_bases_are_compared_on_the_same_rows_and_cases_and_only_what_is_missing_is_done(
    small_project, tiny_base, other_base, change_settings, listener
):
    change_settings(small_project, train={"threads": 1})
    before = (small_project / "graft.yaml").read_bytes()
    names = [str(tiny_base), str(other_base)]
    with opened(small_project, Interrupted()) as work, pytest.raises(SystemExit):
        compare_bases(work, names)
    with opened(small_project, listener) as work:
        compared = compare_bases(work, names)
        assert listener.done == ["train", "evaluate"]
        first, second = compared.trials
        assert [first.base, second.base] == names
        assert [first.license, second.license] == [None, "mit"]
        assert first.run_id != second.run_id
        assert first.after.scores.keys() == second.after.scores.keys()
        assert len(first.after.scores) == compared.cases
        folders = [
            work.project.datasets / work.runs.get(trial.run_id).plan["dataset_hash"]
            for trial in compared.trials
        ]
        one, other = ([(row.id, row.messages) for row in read_rows(folder, "train")] for folder in folders)
        assert one == other
        assert len(one) == compared.rows
        assert work.ledger.get("train") is None
        assert not work.releases.list()
    assert (small_project / "graft.yaml").read_bytes() == before
    # Two untrained models: neither is better.
    assert set(compared.alike) == set(names) - {compared.best}
    assert f"with {compared.cases} cases" in compared.conclusion
    options = [word for name in names for word in ("--base", name)]
    printed = graft(small_project, "run", "--quick", *options).stdout
    assert "cannot be distinguished" in " ".join(printed.split())
    assert f'base: "{compared.best}"' in "".join(printed.splitlines()[-2:])


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["."], "1 of 2 or 3 bases"),
        (["one", "two", "three", "four"], "4 of 2 or 3 bases"),
        (["smollm2-135m-instruct", "nope"], "no base model 'nope'"),
        (["smollm2-135m", "smollm2-135m-instruct"], "the same base is named twice"),
    ],
)
def test_bases_that_cannot_be_compared_are_refused_before_anything_is_done(
    small_project, listener, names, what
):
    with opened(small_project, listener) as work, pytest.raises(UserError) as refused:
        compare_bases(work, names)
    assert what in refused.value.what
    assert refused.value.why
    assert refused.value.fix
    assert refused.value.where
    assert not listener.done


def test_a_base_that_does_not_fit_is_refused_before_the_first_is_trained(
    small_project, tiny_base, other_base, listener
):
    config = json.loads((other_base / "config.json").read_text())
    config |= {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 200, "head_dim": 4096}
    (other_base / "config.json").write_text(json.dumps(config))
    with opened(small_project, listener) as work, pytest.raises(UserError) as refused:
        compare_bases(work, [str(tiny_base), str(other_base)])
    assert f"the base {other_base} does not fit" in refused.value.what
    assert refused.value.why
    assert "train" not in listener.done


def test_bases_without_quick_are_refused(small_project):
    done = graft(small_project, "run", "--base", "smollm2-135m-instruct")
    assert done.returncode == 2
    assert "--quick" in done.stderr
