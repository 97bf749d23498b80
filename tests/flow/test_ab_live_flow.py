"""An experiment on live traffic from end to end: assigned by the real gateway, graded by users, decided."""

import json
import random
import sys
from pathlib import Path

import yaml
from flows import DEADLINE, opened, run_async, serving
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from registry_samples import PROJECT, alias_move, parts, publish_parts, write_adapter

from graftwork.data.ingest.captures import read_captured
from graftwork.engines.protocol import EngineJob
from graftwork.evaluate.live.comparison import compare_live
from graftwork.http.client import Client
from graftwork.records.interaction import Origin
from graftwork.registry.project import open_store
from graftwork.serve.project import StoreSink, describe_experiment
from graftwork.serve.run import ServedProject
from graftwork.serve.settings import ServeSettings, SplitSettings

JSON = (("content-type", "application/json"),)


def prepare(root):
    """A project with two releases, behind champion and challenger."""
    settings = {"project": PROJECT, "data": {"logs": ["x.jsonl"]}, "evaluate": {"metrics": ["json_valid"]}}
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    with opened(root) as work:
        for alias in ("champion", "challenger"):
            folder = write_adapter(root / alias, weights=alias.encode())
            made = publish_parts(folder=open_store(work), index=work.releases, **parts(folder))
            work.releases.move_alias(alias_move(alias, made.id))
        return work.releases.aliases()


def endpoint(work, settings):
    """The real endpoint over the stand-in engine."""
    aliases = work.releases.aliases()
    adapters = dict.fromkeys(aliases.values(), "none")
    job = EngineJob(folder=str(work.project.serving), base_folder="none", adapters=adapters)
    sink = StoreSink(work)
    project = ServedProject(resolve_aliases=work.releases.aliases, captures=sink, feedback=sink)
    return serving(settings, job=job, project=project, engine_module="stub_engine")


async def live_through(url, *, sessions, likes, seed):
    """Users ask, look at who answered only through what they think of it, and say so."""
    chance, http = random.Random(seed), Client(port=int(url.rpartition(":")[2]))
    answered = {}
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client:
        for n in range(sessions):
            for turn in range(1 + n % 2):
                answer = await client.chat.completions.with_raw_response.create(
                    model="champion",
                    messages=[{"role": "user", "content": f"question {turn}"}],
                    extra_headers={"x-session-id": f"{seed}-{n}"},
                )
                release = answer.headers["x-graft-release"]
                assert answered.setdefault(n, release) == release
            output = {"capture": answer.headers["x-graft-capture"], "score": chance.random() < likes[release]}
            reply = await http.send("POST", "/v1/feedback", body=json.dumps(output).encode(), headers=JSON)
            assert (reply.status, bool(await reply.read())) == (200, True)
    health = json.loads((await http.fetch("GET", "/health", seconds=DEADLINE))[1])
    http.close()
    return answered, health


def test_a_better_challenger_is_found_by_what_users_say_also_over_a_restart(tmp_path):
    aliases = prepare(tmp_path)
    likes = {aliases["champion"]: 0.3, aliases["challenger"]: 0.95}
    settings = ServeSettings(port=0, split=SplitSettings(share=0.4))
    with opened(tmp_path) as work:
        pair = (aliases["champion"], aliases["challenger"])
        assert "experiment" in describe_experiment(work, settings)
        before = compare_live(work, "champion", "challenger", metric="feedback")
        assert (before.winner, before.experiment, before.exit_code) == (None, None, 12)
        experiments = set()
        for seed in (1, 2):  # the second time the endpoint was started again

            async def talk(seed=seed):
                async with endpoint(work, settings) as url:
                    return await live_through(url, sessions=40, likes=likes, seed=seed)

            answered, health = run_async(talk)
            assert set(answered.values()) == set(pair)
            assert health["split"]["state"] == "on"
            requests = {arm: facts["requests"] for arm, facts in health["split"]["arms"].items()}
            assert sum(requests.values()) == 60
            experiments.add(health["split"]["experiment"])
        found = compare_live(work, "champion", "challenger", metric="feedback")
        assert experiments == {found.experiment}
        assert (found.winner, found.exit_code) == ("B", 0)
        assert found.used <= 80
        assert found.remarks == ()
        assert found.arms["A"].sessions + found.arms["B"].sessions == 80
        assert found.arms["A"].feedback + found.arms["B"].feedback == 80
        assert compare_live(work, "challenger", "champion", metric="feedback").winner == "A"
        output = [capture for capture in work.captures.export() if capture.feedback is not None]
        assert len(output) == 80
        row = read_captured(output[0].model_dump(mode="json"), Origin(file="captured.jsonl", line=1))
        assert row.reward == output[0].feedback
