"""The release step done again comes to the same release."""

from dataclasses import fields

import yaml
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.pipeline.steps.release import find_parent
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.registry.manifest import Lineage
from graftwork.registry.project import open_store, promote_release


def test_a_release_that_is_made_again_after_its_promotion_is_not_its_own_parent(tmp_path):
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": PROJECT, "data": {"logs": ["l.jsonl"]}}))
    first, second = (write_adapter(tmp_path / name, weights=name.encode()) for name in ("one", "two"))
    with use_project(open_project(tmp_path), NullReporter()) as work:

        def release(adapter, **changes):
            given = {**parts(adapter), **changes}
            lineage = Lineage(**{field.name: given[field.name] for field in fields(Lineage)})
            given["parent"] = find_parent(work, lineage, given["settings"])
            made = publish_parts(folder=open_store(work), index=work.releases, **given)
            promote_release(work, made.id, reason="a test")
            return made

        old, new = release(first), release(second)
        assert (old.parent, new.parent) == (None, old.id)
        assert release(second).id == new.id
        assert len(work.releases.list()) == 2
        assert release(second, settings={"alias": "champion", "keep": 2}).parent == new.id
