"""Machines of a Ray cluster for one command that runs on all of them at once: `python -m …ray_gang ORDER`.

In: how many machines, the command with its place holders `{rank}` and `{host}`. Out: a line of JSON for each
machine that has ended, with its exit code; the output of each in a file of the shared folder. Each is another
node; `{host}` is the address of the first. When one machine fails, the others are ended.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from graftwork.process.cluster.ray_driver import check_nodes, connect, open_events
from graftwork.records.errors import GraftError

PLACE_SECONDS = 600.0
"""How long to wait for as many free nodes."""
LOST = -1
"""The exit code of a machine whose node died."""


def main(text: str) -> int:
    say = open_events()
    import ray

    order = json.loads(text)
    if (fault := connect(ray, order["address"])) is not None:
        say(lost=fault)
        return 1
    try:
        check_nodes(ray, order["stamp"], order["folder"])
        return _run(ray, order, say)
    except GraftError as error:
        say(**error.as_json())
        return 1
    finally:
        ray.shutdown()


def machine_log(folder: Path, rank: int) -> Path:
    """The output of one machine."""
    return folder / f"machine-{rank}.log"


def _run(ray: Any, order: dict[str, Any], say: Any) -> int:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = {"CPU": order["cpus"], **({"GPU": order["gpus"]} if order["gpus"] else {})}
    group = placement_group([share] * order["machines"], strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=PLACE_SECONDS)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        say(lost=f"the cluster has no {order['machines']} free nodes with {share}")
        return 1

    def at(function: Any, rank: int) -> Any:
        chosen = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return ray.remote(function).options(
            num_cpus=order["cpus"], num_gpus=order["gpus"], scheduling_strategy=chosen, max_retries=0
        )

    host = ray.get(at(_own_address, 0).remote())
    parts = {
        at(_run_command, rank).remote(
            order["command"], rank, host, str(machine_log(Path(order["folder"]), rank))
        ): rank
        for rank in range(order["machines"])
    }
    waiting, failed = list(parts), False
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        try:
            code = int(ray.get(ready[0]))
        except Exception:  # its node died, or it was cancelled
            code = LOST
        say(rank=parts[ready[0]], code=code)
        if code and not failed:
            failed = True
            for reference in waiting:
                # They would wait for the missing one until their own time limit.
                ray.cancel(reference, force=True)
    remove_placement_group(group)
    return 0


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _run_command(command: list[str], rank: int, host: str, log: str) -> int:
    """Runs on a node. Its output goes to the shared folder: that of Ray's workers stays on the node."""
    words = [word.replace("{rank}", str(rank)).replace("{host}", host) for word in command]
    with Path(log).open("ab") as output:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
