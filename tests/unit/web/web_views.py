"""Every view of the page, by a name and an address in the project of `web_project`."""


def list_views(folder) -> dict[str, str]:
    from graftwork.api.datasets import list_datasets, list_rows
    from graftwork.api.evaluations import CaseQuery, list_cases
    from graftwork.api.project import open_project

    project = open_project(folder)
    with project.open() as work:
        release, *earlier = work.releases.entries()
        run = work.runs.list(limit=1)[0]
        failed = work.runs.last_failure()
        capture = work.captures.page(limit=1, text="onerror")[0]
    row = list_rows(project, split="train", group="writer").items[0]
    dataset = list_datasets(project)[0].hash
    case = list_cases(project, CaseQuery(outcome="lost")).cases[0]
    return {
        "overview": "/",
        "overview checked": "/?check=1",
        "data": "/data",
        "finding": "/data/findings/placeholder",
        "clusters": "/data/clusters",
        "dataset": f"/data/sets/{dataset}",
        "rows": "/data/sets/latest/rows?split=train&group=writer",
        "row": f"/data/sets/latest/rows/{row.id}",
        "row by token": f"/data/sets/latest/rows/{row.id}?tokens=1",
        "drops": "/data/sets/latest/drops",
        "trace": "/data/trace?what=logs/interactions.jsonl:4",
        "compare datasets": "/data/compare",
        "runs": "/runs",
        "failed runs": "/runs?state=failed",
        "run": f"/runs/{run.id}",
        "failed run": f"/runs/{failed.id}",
        "events": f"/runs/{run.id}/events",
        "compare runs": f"/runs/compare?a={failed.id}&b={run.id}",
        "evaluation": "/evaluation",
        "cases": "/evaluation/cases",
        "lost cases": "/evaluation/cases?outcome=lost&part=group:writer",
        "case": f"/evaluation/cases/{case.id}",
        "escalation": "/evaluation/escalation",
        "review": "/review",
        "releases": "/releases",
        "release": f"/releases/{release.id}",
        "compare releases": f"/releases/compare?a={earlier[0].id[:16]}&b={release.id[:16]}&all=1",
        "captures": "/captures",
        "captures selected": "/captures?max_score=0.4&feedback=all",
        "capture": f"/captures/{capture.id}",
        "playground": "/playground",
        "fleet": "/fleet?ask=1",
        "job": "/fleet/4f1c",
        "week": "/week",
        "plan": "/plan",
        "plan fit": "/plan/fit?model=qwen2.5-7b&gpu=RTX+4090&ram=64&method=qlora&seq=1024&rows=500",
        "plan serve": "/plan/serve?model=qwen2.5-7b&gpu=RTX+4090&ram=64",
        "plan compare": "/plan/compare",
        "plan buy": "/plan/buy?option=2x+RTX+5060+Ti+16GB%3D700&model=olmo-7b&rows=500",
        "week tried": "/week/try?try=1&spend=20&hours.kaggle=-4&seconds=1",
        "cycle": "/cycle",
        "components": "/components",
        "generation": "/components/in?folder=components%2Fafter&against=components%2Fbefore",
        "component": "/components/of/1.4?folder=components%2Fafter",
        "log": "/actions",
        "no such page": "/nothing",
    }
