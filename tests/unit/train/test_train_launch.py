"""How rows are assigned, how several processes are started, how their end is understood."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from distributed_child import make_rows
from hypothesis import given
from hypothesis import strategies as st

from graftwork.records.errors import UserError
from graftwork.train.distributed.launch import (
    NodeGroup,
    _require_possible,
    combined_exit_code,
    parse_address,
    torchrun_arguments,
)
from graftwork.train.distributed.strategies import balance_rows, split_into_micro_batches, zero_config
from graftwork.train.settings import USED_BY, TrainSettings
from graftwork.train.worker import job_settings

ROWS = make_rows(16)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_row_is_assigned_once_and_the_processes_are_balanced(lengths, size):
    hands = balance_rows(lengths, size=size)
    assert sorted(row for hand in hands for row in hand) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in hand) for hand in hands]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert balance_rows(lengths, size=size) == hands


@given(st.integers(1, 16), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 6)))
def test_all_work_equally_often_and_every_row_counts_once(count, size, micro_rows):
    rows = ROWS[:count]
    portions = split_into_micro_batches(rows, size=size, micro_rows=micro_rows)
    assert len({len(own) for own in portions}) == 1
    assert all([portion.last for portion in own] == [False] * (len(own) - 1) + [True] for own in portions)
    counted = [row.id for own in portions for portion in own if portion.counts for row in portion.rows]
    assert sorted(counted) == sorted(row.id for row in rows)
    if micro_rows is not None:
        assert all(len(portion.rows) <= micro_rows for own in portions for portion in own)
    assert all(portion.rows for own in portions for portion in own)


def test_one_process_keeps_the_rows_in_their_order():
    assert [row.id for row in split_into_micro_batches(ROWS, size=1)[0][0].rows] == [row.id for row in ROWS]


def test_one_machine_finds_a_port_and_several_meet_at_the_first():
    alone = torchrun_arguments(processes=2, machines=NodeGroup(), module="m", job_file="job.json")
    assert alone[0] == "--standalone"
    assert alone[-3:] == ("-m", "m", "job.json")
    third = NodeGroup(count=4, rank=2, address="10.0.0.1", port=29500)
    reported = torchrun_arguments(processes=8, machines=third, module="m", job_file="job.json")
    assert reported[:8] == (
        *("--nnodes", "4", "--node-rank", "2"),
        *("--master-addr", "10.0.0.1", "--master-port", "29500"),
    )
    assert reported[8:12] == ("--nproc-per-node", "8", "--max-restarts", "0")


def test_torchrun_accepts_the_arguments_it_gets():
    from torch.distributed.run import get_args_parser

    machines = NodeGroup(count=2, rank=1, address="h", port=1)
    reported = torchrun_arguments(processes=3, machines=machines, module="m", job_file="j")
    args = get_args_parser().parse_args(list(reported))
    assert (args.nnodes, args.node_rank, args.nproc_per_node, args.master_port) == ("2", 1, "3", 1)
    assert (args.module, args.training_script, args.training_script_args) == (True, "m", ["j"])


@pytest.mark.parametrize(
    ("text", "address"),
    [("host", ("host", 29400)), ("10.0.0.1:5000", ("10.0.0.1", 5000)), ("[::1]:7", ("::1", 7))],
)
def test_an_address_is_a_host_and_perhaps_a_port(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":5", "host:", "host:x", "host:70000", "::1", "[]:5"])
def test_an_invalid_address_is_refused(text):
    with pytest.raises(UserError, match="not the address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("codes", "end"),
    [
        ({0: 0, 1: 0}, 0),
        ({0: 1, 1: -9}, -9),  # the first fails because the second was killed
        ({0: -15, 1: -9}, -9),
        ({0: 75, 1: 75}, 75),
        ({0: 2, 1: -15}, 2),  # the first said what is wrong; the second was asked to stop
        ({0: -15, 1: -15}, -15),
    ],
)
def test_the_exit_code_of_several_processes_is_that_of_the_first_cause(codes, end):
    assert combined_exit_code(codes) == end


def test_offload_and_clipping_reach_deepspeed():
    plain, spilled = (zero_config(3, offload=offload, most=0.7) for offload in (False, True))
    assert plain["gradient_clipping"] == 0.7
    assert "offload_param" not in plain["zero_optimization"]
    assert spilled["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert spilled["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in zero_config(2, offload=True, most=1)["zero_optimization"]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"strategy": "fsdp", "method": "qlora"}, "bfloat16"),
        ({"strategy": "zero2"}, "float16"),
    ],
)
def test_incompatible_settings_are_refused_before_a_model_is_loaded(settings, dtype):
    with pytest.raises(UserError, match="strategy"):
        _require_possible(TrainSettings.model_validate(settings), dtype, on_cpu=True)


def test_a_run_continues_with_another_number_of_processes():
    one, two = TrainSettings(), TrainSettings(strategy="fsdp", processes=8, offload=True)
    assert one.what_is_learned() == two.what_is_learned()
    assert two.distribution() == {"strategy": "fsdp", "processes": 8, "offload": True}


def test_how_a_run_is_saved_and_hastened_is_not_what_it_learns_and_reaches_the_worker_all_the_same():
    one = TrainSettings()
    two = TrainSettings(checkpoint_every=3, keep_checkpoints=7, compile="off", packing="off")
    assert one.what_is_learned() == two.what_is_learned()
    plan = SimpleNamespace(train={"settings": two.what_is_learned()})
    job = SimpleNamespace(plan=plan, run={}, crew=two.distribution(), keeping=two.keeping(), endpoint={})
    assert job_settings(job) == two


@pytest.mark.parametrize(
    "changed", [{"watch": {"spike": 3.0}}, {"seed": 3}, {"validation_rows": 4}, {"eval": {"every": 2}}]
)
def test_a_setting_that_changes_the_result_makes_another_run(changed):
    assert TrainSettings.model_validate(changed).what_is_learned() != TrainSettings().what_is_learned()


def test_every_setting_reaches_the_worker_by_one_way():
    settings = TrainSettings()
    ways = [settings.what_is_learned(), settings.keeping(), settings.distribution(), {"run": ...}]
    names = [name for way in ways for name in way]
    assert len(names) == len(set(names))
    used = {name for objective in USED_BY.values() for name in objective}
    # Named only where they have an effect: other runs keep their names.
    assert {*names, *used, "experts", "proximal"} == set(TrainSettings.model_fields)


LEAVES = """
import atexit, os
from graftwork.train.distributed.launch import leave

class LikeAGroupsThread:
    def __del__(self, abort=os.abort):
        abort()

held = LikeAGroupsThread()
atexit.register(print, "handlers ran")
leave(3)
"""


def test_a_process_of_a_group_leaves_with_its_code_whatever_the_interpreters_shutdown_would_do():
    done = subprocess.run(
        [sys.executable, "-c", LEAVES],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "handlers ran\n"), done.stderr
