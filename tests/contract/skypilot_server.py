"""A stand-in for the command of SkyPilot: managed jobs on the simulated provider.

Tasks are checked by SkyPilot's own schemas (`tests/data/skypilot_schemas.json`, version 0.14.1); words and
options are those of its command, any other is an error.
"""

import json
import shlex
from pathlib import Path

import jsonschema_rs
import yaml
from cloud_server import PYTHON, CloudStandIn
from fleet_simulator import CARD, OTHER_GPU

from graftwork.fleet.place import PlaceUnreachable, Refused

SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "skypilot_schemas.json").read_text())
STATES = {"waiting": "STARTING", "running": "RUNNING", "done": "SUCCEEDED", "ended": "CANCELLED"}


def problems(task) -> list[str]:
    found = [error.message for error in jsonschema_rs.validator_for(SCHEMAS["task"]).iter_errors(task)]
    resources = jsonschema_rs.validator_for(SCHEMAS["resources"])
    found += [error.message for error in resources.iter_errors(task.get("resources", {}))]
    storage = jsonschema_rs.validator_for(SCHEMAS["storage"])
    for mount in task.get("file_mounts", {}).values():
        found += [error.message for error in storage.iter_errors(mount)]
    return found


class SkyPilotStandIn(CloudStandIn):
    def __init__(self, provider, root):
        super().__init__(provider, root)
        self.tasks, self.secrets = {}, {}
        self.logged_in, self.reachable = True, True
        self.storage = root / "bucket"
        self.storage.mkdir(parents=True)

    def __call__(self, words, environment):
        """What the command would do: exit code, output, errors."""
        self.raw.append(json.dumps([*words]).encode())
        if not self.reachable:
            return 1, "", "Connection to the API server failed"
        if not self.logged_in:
            return 1, "", "No cloud access is set up. Run: sky check"
        group, verb, *rest = words
        assert group == "jobs"
        try:
            return 0, getattr(self, f"do_{verb}")(rest, environment), ""
        except Refused as refused:
            return 1, "", f"sky.exceptions.ResourcesUnavailableError: {refused.what} (quota)"
        except PlaceUnreachable as error:
            return 1, "", f"Connection: {error.what}"

    def do_launch(self, words, environment):
        options = {"-n": None}
        secrets, at = {}, 0
        while at < len(words) - 1:
            if words[at] in ("-n", "--secret"):
                value = words[at + 1]
                at += 1
                if words[at - 1] == "-n":
                    options["-n"] = value
                else:
                    secrets[value] = environment[value]
            else:
                assert words[at] in ("-d", "-y"), words[at]
            at += 1
        text = Path(words[-1]).read_text()
        self.raw.append(text.encode())
        task = yaml.safe_load(text)
        assert problems(task) == []
        label = options["-n"]
        assert task["name"] == label
        self.creations += 1
        self.tasks[label], self.secrets[label] = task, secrets
        card = task["resources"]["accelerators"].removesuffix(":1")
        self.provider.create(label, gpu=card, seconds=3600)
        return "Job submitted"

    def do_queue(self, words, _environment):
        assert words[:2] == ["-o", "json"]
        if "--skip-finished" in words:
            machines = self.provider.list()
        else:
            self.provider._answer()
            machines = [
                machine for machine in self.provider.machines if machine.created_at <= self.provider.now
            ]
        rows = [self.row(machine) for machine in machines]
        if "--skip-finished" in words:
            rows = [row for row in rows if row["status"] in ("STARTING", "RUNNING")]
        other = {"job_id": 9999, "job_name": "graft-of-another", "status": "RUNNING"}
        return f"Fetching managed job statuses...\n{json.dumps([*rows, other])}"

    def do_cancel(self, words, _environment):
        assert words[0] == "-y"
        self.provider.terminate(self.provider.machines[int(words[1])].id)
        return "Cancelled"

    def do_logs(self, words, _environment):
        assert words[0] == "--no-follow"
        return self.output(self.provider.machines[int(words[1])].label)

    def row(self, machine):
        phase = self.phase(machine)
        if machine.label not in self.processes and phase == "done":
            out = self.storage / "jobs" / machine.label / "out"
            out.mkdir(parents=True, exist_ok=True)
            (out / "exit.json").write_text(json.dumps(self.simulated_exit(machine)))
        assert machine.gpu in (CARD, OTHER_GPU)
        return {
            "job_id": self.provider.machines.index(machine),
            "job_name": machine.label,
            "status": STATES[phase],
            "submitted_at": machine.created_at + self.provider.clock() - self.provider.now,
            "accelerators": {machine.gpu: 1},
        }

    def command(self, label):
        task, folder = self.tasks[label], self.root / label
        ((path, mount),) = task["file_mounts"].items()
        assert mount == {"source": "s3://bucket", "mode": "MOUNT"}
        words = [
            word.replace("/tmp/", f"{folder}/tmp/").replace(f"{path}/", f"{self.storage}/")
            for word in shlex.split(task["run"])
        ]
        return [PYTHON, *words[1:]], dict(self.secrets[label]), folder
