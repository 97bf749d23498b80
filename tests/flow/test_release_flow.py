"""A specialist is released by itself: its own alias and version, a lineage down to its log lines."""

import json

from flows import opened

from graftwork.data.project import PreparedData
from graftwork.files.dataset import iterate_rows
from graftwork.pipeline.table import run_pipeline
from graftwork.records.release import Release
from graftwork.registry.project import open_store, trace_release


def test_a_specialist_is_released_with_its_whole_lineage(small_project, change_settings):
    change_settings(small_project, models={"main": {}, "tagger": {}})
    with opened(small_project, model="tagger") as work:
        made = run_pipeline(work, upto="release")
        release = made.get("release", Release)
        assert release.model == "tagger"
        assert work.releases.aliases() == {"tagger/champion": release.id}
        assert work.releases.entry(release.id).version == "1.0.0"
        folder = open_store(work).get(release.id)
        assert json.loads((folder / "outcome.json").read_bytes())["residuals"]
        graph = trace_release(work, release)
        prepared = made.get("prepare", PreparedData)
        for split in ("train", "test"):
            rows = list(iterate_rows(work.project.root / prepared.folder, split))
            node = next(n for n in graph.nodes if n.kind == "lines" and n.facts["split"] == split)
            assert node.facts["count"] == str(len(rows))
            assert numbers_of(node.facts["lines"]) == {row.origin.line for row in rows}
        run = next(node for node in graph.nodes if node.kind == "run")
        assert run.facts["state"] == "done"
        assert {n.facts["state"] for n in graph.nodes if n.kind == "file"} == {"as it was"}


def numbers_of(ranges: str) -> set[int]:
    found: set[int] = set()
    for part in ranges.split(", "):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
