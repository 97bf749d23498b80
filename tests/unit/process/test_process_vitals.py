"""The vitals: parsed from what machines really print, sampled at a bounded rate, never in the way."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.files.disk import Journal
from graftwork.process import machine
from graftwork.process.heartbeat import Sampler, growth_per_minute, seconds_between_lines
from graftwork.process.machine import (
    ask_nvml,
    find_probe,
    is_exhaustion,
    killed_for_memory,
    parse_smi,
    requested_gib,
)
from graftwork.records.fleet import DeviceVitals, Vitals

# As printed by nvidia-smi 570 on an H200 and on a laptop's card that knows less of itself.
TWO_CARDS = (
    "0, GPU-5a1b0c2d-0000-1111-2222-333344445555, NVIDIA H200, 97, 51234, 143771, 64, 612.35\n"
    "1, GPU-9f8e7d6c-0000-1111-2222-333344445555, NVIDIA GeForce GTX 1650, [N/A], 312, 4096, 41,"
    " [Not Supported]\n"
)

MEMINFO = """MemTotal:       24565236 kB
MemFree:        11534340 kB
MemAvailable:   22282240 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
"""


def test_output_of_nvidia_smi_is_read_with_its_unknown_values():
    first, second = parse_smi(TWO_CARDS)
    assert first == DeviceVitals(
        index=0,
        name="NVIDIA H200",
        use_percent=97,
        memory_gib=51234 / 1024,
        memory_total_gib=143771 / 1024,
        temperature_c=64,
        power_watts=612.35,
    )
    assert (second.use_percent, second.power_watts, second.temperature_c) == (None, None, 41)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("1", [1]), ("0,1", [0, 1]), ("", []), ("GPU-9f8e", [1]), ("-1", [])],
)
def test_only_devices_that_the_process_may_use_are_watched(visible, indices):
    assert [device.index for device in parse_smi(TWO_CARDS, visible=visible)] == indices


@given(st.text())
def test_no_output_of_the_command_can_hurt(printed):
    assert isinstance(parse_smi(printed), tuple)
    parse_smi(TWO_CARDS + printed)


def test_a_real_command_is_asked_and_rests_after_it_failed_a_few_times(tmp_path, monkeypatch):
    calls, broken = tmp_path / "calls", tmp_path / "broken"
    command = tmp_path / "nvidia-smi"
    command.write_text(
        f"#!/bin/sh\necho x >> {calls}\n[ -e {broken} ] && exit 9\nprintf '%s' '{TWO_CARDS}'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_nvml_probe", lambda: None)
    probe = find_probe()
    assert [device.index for device in probe()] == [0, 1]
    broken.touch()
    assert [probe() for _ in range(10)] == [()] * 10
    assert len(calls.read_text().splitlines()) == 1 + machine.FAILURES_BEFORE_REST


def test_without_a_card_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "_nvml_probe", lambda: None)
    assert find_probe() is None


def test_the_library_of_the_driver_is_asked_where_it_is_there():
    def refuse(_handle):
        raise RuntimeError("not supported")

    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _handle: b"GPU-1",
        nvmlDeviceGetName=lambda _handle: "a card",
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(used=2**30, total=2**34),
        nvmlDeviceGetUtilizationRates=lambda _handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetTemperature=lambda _handle, _kind: 60,
        nvmlDeviceGetPowerUsage=refuse,
    )
    (found,) = ask_nvml(nvml, visible=None)
    assert (found.memory_gib, found.memory_total_gib, found.use_percent) == (1.0, 16.0, 50)
    assert found.power_watts is None


def test_the_machines_memory_is_read():
    found = machine.parse_meminfo(MEMINFO)
    assert found["limit"] == pytest.approx(23.43, abs=0.01)
    assert found["free"] == pytest.approx(21.25, abs=0.01)
    assert found["swap_used"] == 1.0
    assert machine.parse_meminfo("") == {}


def test_a_containers_limit_counts_where_it_is_lower(tmp_path, monkeypatch):
    group = tmp_path / "cgroup" / "box"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "vmstat").write_text("pswpin 3\npswpout 4\noom_kill 0\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/box\n")
    (group / "memory.max").write_text(f"{2 * 2**30}\n")
    (group / "memory.current").write_text(f"{2**30}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {2**29}\n")
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    found = machine.machine_memory()
    assert (found["limit"], found["free"]) == (2.0, 1.5)
    assert machine.kernel_kills() == 1
    assert machine.swapped_pages() == 7


def test_samples_are_kept_at_a_bounded_rate(tmp_path):
    moment = [0.0]
    sampler = Sampler(tmp_path, clock=lambda: moment[0], probe=tuple, sample_seconds=5.0)
    taken = 0
    for second in range(0, 200, 1):
        moment[0] = float(second)
        if sampler.due():
            sampler.sample()
            taken += 1
    lines = Journal(tmp_path / "vitals.jsonl").read()
    assert taken == len(lines) == 40
    assert Vitals.model_validate(lines[-1]) == sampler.latest
    assert sampler.latest.cpu_cores is not None


@given(st.floats(0, 1e7))
def test_a_long_run_writes_fewer_lines_and_one_each_minute_at_least(elapsed):
    assert seconds_between_lines(elapsed) <= 60
    assert seconds_between_lines(elapsed) <= seconds_between_lines(elapsed + 3600)
    assert seconds_between_lines(elapsed) >= 4


def test_growth_is_what_stays_not_what_comes_and_goes():
    sawtooth = [(5.0 * at, 2.0 + (at % 3)) for at in range(60)]
    assert growth_per_minute(sawtooth) == 0.0
    rising = [(5.0 * at, 2.0 + 0.1 * at) for at in range(60)]
    assert growth_per_minute(rising) == pytest.approx(1.2)
    assert growth_per_minute(rising[:5]) == 0.0
    assert growth_per_minute([]) == 0.0


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory."), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_only_exhaustion_is_called_so(error, found):
    assert is_exhaustion(error) is found


def test_the_refused_allocation_is_read_from_the_message():
    assert requested_gib("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0") == {"asked_gib": 0.5}
    assert requested_gib("you tried to allocate 1073741824 bytes.") == {"asked_gib": 1.0}
    assert requested_gib("nothing of the kind") == {}


def test_a_kill_is_put_down_to_memory_only_with_evidence():
    starved = Vitals(at=0, memory_gib=7.5, memory_limit_gib=8.0, memory_free_gib=0.1)
    well = starved.model_copy(update={"memory_free_gib": 4.0})
    assert killed_for_memory(-9, kills=0, vitals=well) is None
    assert killed_for_memory(-9, kills=0, vitals=None) is None
    assert killed_for_memory(-15, kills=3, vitals=starved) is None
    assert killed_for_memory(-9, kills=1, vitals=None).figures == {}
    found = killed_for_memory(-9, kills=0, vitals=starved)
    assert found.figures == {"peak_memory_gib": 7.5, "memory_limit_gib": 8.0}
    assert "0.10 GiB" in found.why


def test_tensors_of_a_process_without_a_device_use_nothing_there():
    assert machine.peak_allocated_gib() is None
