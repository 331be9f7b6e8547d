"""`tracking.system_metrics=true`: the use of each host of a run, in journals of the hosts and in MLflow."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.config import schema
from runner.tracking.backends import host_metrics
from runner.tracking.backends.host_metrics import PERIOD, HostMetrics, build_sample
from runner.tracking.curves import read_metrics
from runner.tracking.journal import iterate_journal, journal_path
from tests.launch.test_gang import FINISH, JOIN, SUPERVISE, TASK, env, prepared
from tests.launch.test_rendezvous import WORKERS
from tests.support.command_line import CommandLine
from tests.support.processes import wait_until

OFTEN = {PERIOD: "0.05"}
PYNVML = '''
from types import SimpleNamespace

class NVMLError(Exception):
    """What NVIDIA's library says."""

def nvmlInit():
    if {is_without_driver}:
        raise NVMLError("no driver")

def nvmlDeviceGetCount():
    return 2

def nvmlDeviceGetHandleByIndex(number):
    return number

def nvmlDeviceGetMemoryInfo(gpu):
    return SimpleNamespace(used=2_000_000 * (gpu + 1), total=8_000_000)

def nvmlDeviceGetUtilizationRates(gpu):
    return SimpleNamespace(gpu=70 + gpu)

def nvmlDeviceGetPowerUsage(gpu):
    if gpu:
        raise NVMLError("not supported")
    return 150_000

def nvmlDeviceGetEnforcedPowerLimit(gpu):
    return 600_000
'''


def has_lines(model_dir: Path, least: int) -> bool:
    return len(lines_of(model_dir)) >= least


def lines_of(model_dir: Path, node: str = "here") -> list[dict[str, Any]]:
    return list(iterate_journal(journal_path(model_dir, "host", node)))


@pytest.fixture
def pynvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module that stands for nvidia-ml-py's."""
    file = tmp_path / "site" / "pynvml.py"
    file.parent.mkdir()
    monkeypatch.syspath_prepend(file.parent)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield file
    sys.modules.pop("pynvml", None)


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_names_are_those_of_mlflows_own_monitor_whose_pages_show_them() -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    theirs: set[str] = set()
    for monitor in (CPUMonitor(), DiskMonitor(), NetworkMonitor()):
        monitor.collect_metrics()
        theirs |= set(monitor._metrics)
    values = build_sample()()
    assert {name for name in values if not name.startswith("gpu_")} == theirs
    assert 0 < values["system_memory_usage_percentage"] < 100
    assert values["disk_available_megabytes"] > 0


def test_gpus_are_measured_by_nvidias_library_as_far_as_it_can(pynvml: Path) -> None:
    pynvml.write_text(PYNVML.format(is_without_driver=False))
    found = {name: value for name, value in build_sample()().items() if name.startswith("gpu_")}
    assert found == {
        "gpu_0_memory_usage_percentage": 25.0, "gpu_0_memory_usage_megabytes": 2.0, "gpu_0_utilization_percentage": 70,
        "gpu_0_power_usage_watts": 150.0, "gpu_0_power_usage_percentage": 25.0,
        "gpu_1_memory_usage_percentage": 50.0, "gpu_1_memory_usage_megabytes": 4.0, "gpu_1_utilization_percentage": 71,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no such package')", "no such package (pip install nvidia-ml-py)"),
        (PYNVML.format(is_without_driver=True), "no driver"),
    ],
)
def test_without_the_library_or_its_driver_the_rest_is_measured_and_the_reason_is_said_once(
    pynvml: Path, capsys: pytest.CaptureFixture[str], code: str, reason: str
) -> None:
    host_metrics._say_unmeasured.cache_clear()
    pynvml.write_text(code)
    for _ in range(2):  # as of two calls of `train` in a script
        names = set(build_sample()())
        assert "cpu_utilization_percentage" in names and not [name for name in names if name.startswith("gpu_")]
    assert capsys.readouterr().err.count(f"GPUs of this host are not measured: {reason}") == 1


def test_a_mistake_of_ours_in_asking_for_the_gpus_is_not_taken_for_a_host_without_them(pynvml: Path) -> None:
    pynvml.write_text("class NVMLError(Exception): ...")
    with pytest.raises(AttributeError):
        build_sample()


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_host_goes_on_counting_where_its_journal_ends(tmp_path: Path) -> None:
    for number in (1, 2):
        with HostMetrics(tmp_path, OFTEN):
            wait_until(functools.partial(has_lines, tmp_path, 2 * number))
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps == list(range(len(steps)))
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics of this host"]


def test_one_of_the_processes_of_a_host_measures_it(tmp_path: Path) -> None:
    with HostMetrics(tmp_path, OFTEN, "node-a"), HostMetrics(tmp_path, OFTEN, "node-a"):
        with HostMetrics(tmp_path, OFTEN, "node-b.example.org"):
            wait_until(lambda: len(lines_of(tmp_path, "node-b.example.org")) >= 3)
    steps = [line["step"] for line in lines_of(tmp_path, "node-a")]
    assert steps and steps == list(range(len(steps)))
    assert all(name.startswith("system/node-a/") for line in lines_of(tmp_path, "node-a") for name in line["metrics"])
    assert read_metrics(tmp_path) == {}, "the curves of a run are those of its steps"


def test_a_lost_folder_ends_the_measurement_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with HostMetrics(folder, OFTEN):
        wait_until(lambda: len(lines_of(folder)) >= 1)
        shutil.rmtree(folder)
    assert not folder.exists()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_of_one_host_has_its_use_in_mlflow_and_in_no_other_tracker(
    tmp_path: Path, command_line: CommandLine, empty_mlflow_database: Path
) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    words = ("train.max_steps=300", "tracking.backend=[mlflow,csv]", "tracking.system_metrics=true", "model_dir=run")
    done = command_line(*words, cwd=tmp_path, **OFTEN)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    measured = {name for name in run.data.metrics if name.startswith("system/")}
    assert "system/cpu_utilization_percentage" in measured and not [name for name in measured if name.count("/") > 1]
    recorded = client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert [point.step for point in recorded] == [line["step"] for line in lines_of(tmp_path / "run")]
    assert "system/" not in (tmp_path / "run" / "tracking" / "metrics.csv").read_text()
    peak = json.loads((tmp_path / "run" / "summary.json").read_text())["peak_memory"]
    assert set(peak) == {"process"} and 1e8 < peak["process"] < 1e11


def test_a_run_of_several_hosts_has_each_under_its_name(tmp_path: Path, empty_mlflow_database: Path) -> None:
    from mlflow import MlflowClient

    shutil.copy(empty_mlflow_database, tmp_path / "mlflow.db")
    waits = "time.sleep(1.5)\n"
    processes = []
    for name, code in {"worker:0": JOIN + waits, "chief": JOIN + waits + FINISH}.items():
        config = prepared(tmp_path, {name: code}, "multi_worker", backend="mlflow")
        config = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, system_metrics=True))
        file = tmp_path / f"{name}.yaml"
        schema.save(config, file)
        role, _, index = name.partition(":")
        place = json.dumps({"cluster": WORKERS, "task": {"type": role, "index": int(index or 0)}})
        script = SUPERVISE.format(task=str(TASK)).replace("config.yaml", file.name)
        # Both are on this machine: each takes the name of a host of its own.
        script = f"import platform\nplatform.node = lambda: 'node-{role}.example'\n{script}"
        settings = {**env(), **OFTEN, "TF_CONFIG": place}
        processes.append(subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=settings))
    assert [process.wait(150) for process in processes] == [0, 0]
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    for node in ("node-chief.example", "node-worker.example"):
        assert f"system/{node}/cpu_utilization_percentage" in run.data.metrics
    assert "system/cpu_utilization_percentage" not in run.data.metrics


def test_no_host_is_measured_that_nobody_asked_for(tmp_path: Path, command_line: CommandLine) -> None:
    for words in (["tracking=none"], ["tracking=csv"]):
        done = command_line(*words, "train.max_steps=3", f"model_dir={words[0][9:]}", cwd=tmp_path, **OFTEN)
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("events.host-*"))


def test_the_seconds_between_two_measurements_are_ten_unless_mlflows_variable_says_otherwise(tmp_path: Path) -> None:
    assert HostMetrics(tmp_path, {})._period_secs == 10.0
    assert HostMetrics(tmp_path, OFTEN)._period_secs == 0.05
    assert os.environ.get(PERIOD) is None and host_metrics.PERIOD.startswith("MLFLOW_SYSTEM_METRICS_")
