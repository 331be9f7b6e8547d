"""Training with parameter servers: two workers and two servers, and one coordinator that runs every case."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.checkpoint import reader
from runner.config import parsing, schema
from runner.task import main
from tests.config.test_config import composed
from tests.support.command_line import CommandLine
from tests.support.journal import events_in
from tests.support.messages import Messages

ROOT = Path(__file__).parents[2]


class Cases:
    """What came out of each case."""

    def __init__(self, folder: Path, log: str) -> None:
        self._folder, self._log = folder, log

    def __getitem__(self, name: str) -> Any:
        file = self._folder / f"{name}.json"
        assert file.exists(), f"{name} was not run, or hung:\n{self._log[-6000:]}"
        case = json.loads(file.read_text())
        assert "error" not in case, case["error"]
        return case["found"]


def run_cases(folder: Path, *names: str) -> Cases:
    """In a cluster of their own; without a name all that are not slow; slow: those that are."""
    command = [sys.executable, "-m", "tests.support.parameter_server_cases", str(folder), *names]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    said = folder / "said.txt"
    # A case that hangs has then said where; those before it have ended.
    with said.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=500)
    return Cases(folder, said.read_text())


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return run_cases(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def slow_cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return run_cases(tmp_path_factory.mktemp("slow_cases"), "slow")


@pytest.mark.slow
def test_a_model_of_keras_is_trained_as_in_one_process(slow_cases: Cases) -> None:
    """What test_one_update_after_the_other says of the other styles."""
    assert_trained_as_alone(slow_cases["same_keras_model"])


@pytest.mark.parametrize("style", ["native", "classic"])
def test_one_update_after_the_other_is_training_in_one_process(style: str, cases: Cases) -> None:
    assert_trained_as_alone(cases[f"same_{style}"])


def assert_trained_as_alone(found: Mapping[str, Any]) -> None:
    assert found["difference"] and max(found["difference"].values()) <= 1e-5, found["difference"]
    served, alone = found["metrics"]
    assert served == pytest.approx(alone, rel=1e-6)
    served_predictions, alone_predictions = found["predictions"]
    np.testing.assert_allclose(served_predictions, alone_predictions, rtol=1e-5)


@pytest.mark.parametrize("source", ["known", "unknown", "python", "unordered", "unseeded"])
def test_each_example_is_trained_on_once_an_epoch(source: str, cases: Cases) -> None:
    """403 examples in batches of 8, the last of 3: 51 updates an epoch, by two workers that take what comes."""
    assert cases["epochs"][source] == [[[2.0, 403]], 102]


def test_a_run_that_goes_on_begins_at_the_next_batch(cases: Cases) -> None:
    assert cases["epochs"]["before"] == [[[0.0, 243], [1.0, 160]], 20]
    assert cases["epochs"]["resumed"] == [[[1.0, 403]], 51]


def test_workers_with_data_of_their_own_come_to_their_ends_one_by_one(cases: Cases) -> None:
    """200 examples for one worker and 100 for the other: 25 and 13 updates."""
    assert cases["own_parts"][:2] == [[[1.0, 300]], 38]


def test_what_a_hook_logs_is_in_the_event_file_once(cases: Cases) -> None:
    _, last, logged = cases["own_parts"]
    steps = [step for step, _ in logged]
    assert steps == sorted(set(steps)) and steps[-1] == last
    assert [value for _, value in logged] == steps


def test_no_update_is_lost_to_the_counters_and_it_learns(cases: Cases) -> None:
    found = cases["counters"]
    assert found["global_step"] == found["iterations"] == 600
    assert found["examples"] == 85 * 50 + 40  # 85 epochs of 7 batches, and 5 full ones
    assert found["after"] < 0.1 * found["before"]


def test_options_of_an_update_do_what_they_do_in_one_process(cases: Cases) -> None:
    """Micro-batches, clipping, warm-up and averages at once."""
    difference = cases["options"]["difference"]
    assert difference and max(difference.values()) <= 1e-5, difference


def test_summaries_of_a_step_that_a_worker_took_are_written(cases: Cases) -> None:
    assert {"new", "old", "loss"} <= set(cases["options"]["summaries"])


def test_what_workers_at_their_own_pace_cannot_do_is_refused(cases: Cases, messages: Messages) -> None:
    found = cases["options"]
    for option in ("nan", "precision", "ema_overwrite_frequency"):
        messages.same(option, found[option])


def test_a_divided_variable_that_became_non_finite_is_not_saved(cases: Cases, messages: Messages) -> None:
    found = cases["not_finite"]
    assert found["step"] == 0
    messages.same("error", found["error"])


@pytest.mark.parametrize("optimizer", ["sgd", "v1_adam"])
def test_a_divided_embedding_trains_as_a_whole_one(optimizer: str, cases: Cases) -> None:
    """It begins with the checkpoint of a whole one, and its own names the same variables."""
    assert_divided_as_whole(cases["divided"][optimizer])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "use_ema", "v1_adagrad"])
def test_a_divided_embedding_trains_as_a_whole_one_with_other_optimizers(optimizer: str, slow_cases: Cases) -> None:
    assert_divided_as_whole(slow_cases["divided_more"][optimizer])


def assert_divided_as_whole(difference: Mapping[str, float]) -> None:
    assert len(difference) >= 3 and max(difference.values()) <= 2e-5, difference


def test_the_checkpoint_of_a_divided_variable_is_one_of_a_whole_one(cases: Cases) -> None:
    found = cases["divided"]
    assert found["shapes"]["table/embeddings"] == [50, 3]
    assert found["shapes"]["sgd/table_embeddings_momentum"] == [50, 3]
    assert found["shapes"]["table/embeddings/ExponentialMovingAverage"] == [50, 3]
    served, read_alone, whole = found["metrics"]
    assert served == pytest.approx(read_alone, rel=1e-6) and served == pytest.approx(whole, rel=1e-5)
    assert found["on"] == 20  # a single process trained on from it


@pytest.mark.slow
@pytest.mark.parametrize("divides", ["False", "True"])
def test_a_variable_that_a_v1_partitioner_cut_trains_with_a_v1_optimizer(divides: str, slow_cases: Cases) -> None:
    """`AdamOptimizer.minimize` asked the parts for their `op`, and failed. The strategy may divide them once more."""
    found = slow_cases["cut_by_v1"][divides]
    assert {"table", "table/Adam", "table/Adam_1"} <= set(found["difference"])
    assert max(found["difference"].values()) <= 2e-5, found["difference"]
    assert found["shapes"]["table"] == found["shapes"]["table/Adam"] == [50, 3]


@pytest.mark.slow
def test_an_embedding_may_be_larger_than_the_memory_of_the_coordinator(slow_cases: Cases) -> None:
    """Made, trained, saved, verified, restored, evaluated (with averages that were trained here, and such as are only
    in the checkpoint) and exported: at the peak of all of it the coordinator has what one of two servers has of it."""
    found = slow_cases["large"]
    assert found["parts"] < 1.7  # in units of that; a second part would be 2
    assert found["steps"][1] == 20 and np.isfinite(found["losses"][0])
    assert found["losses"][1] == pytest.approx(found["losses"][0], rel=1e-6)
    assert found["rows"] == [True] * 4


@pytest.mark.parametrize("source", ["known", "unknown", "python", "steps", "dropout", "hook"])
def test_workers_evaluate_to_the_numbers_of_a_single_process(source: str, cases: Cases) -> None:
    """19 batches, the last of 6 examples; metrics of v1 are float32 by themselves."""
    one, many = cases["evaluation"][source]
    assert many.keys() == {"loss", "each", "noise", "keras", "pair", "auc", "global_step"}
    assert_equal(many, one)


def assert_equal(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """The parts of workers come in any order, which shows in what is float32."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6 if name in ("pair", "auc") else 1e-10), name


def test_each_evaluation_is_asked_of_the_workers_and_begins_with_nothing(cases: Cases) -> None:
    found = cases["evaluation"]
    assert found["known requests"] >= 4
    assert found["python requests"] == 19  # batch by batch, from the coordinator
    for again in found["again"]:
        assert_equal(again, found["known"][1])


def test_hooks_fetch_what_the_coordinator_evaluates_and_what_a_worker_trained_on(cases: Cases) -> None:
    found = cases["evaluation"]["fetched"]
    assert found == {"steps": [2, 4], "trained on": [16, True], "evaluated": [True, True]}


def test_what_workers_cannot_evaluate_the_coordinator_does_and_says_why(cases: Cases, messages: Messages) -> None:
    here = cases["evaluation"]["here"]
    assert here["requests"] >= 4 and here["batches"] == 19  # of Keras layers that draw; of the hook
    (said,) = [line for line in here["said"] if "itself" in line]
    messages.same("log", said)
    one, many = cases["evaluation"]["largest"]
    assert_equal(many, one)  # a state that cannot be merged
    assert cases["evaluation"]["largest requests"] == 0


def test_an_evaluation_that_loses_a_worker_counts_each_example_once(cases: Cases) -> None:
    found = cases["evaluation_lost"]
    assert found["metrics"]["n"] == 1200
    assert found["metrics"]["x"] == pytest.approx(599.5, rel=1e-10)
    assert LOST in found["said"] and not [line for line in found["said"] if "Error" in line]


LOST = "worker:1 was lost. Its request is repeated by this worker or another one."


@pytest.mark.slow
def test_every_strategy_of_evaluation_beside_servers_gives_the_numbers_of_one_device(slow_cases: Cases) -> None:
    """Also of a compiled model: test_strategy_pairs.py."""
    found = slow_cases["pairs"]
    assert found["step"] == 100 and found["expected"]["loss"] < 1  # it began at 14
    assert set(found["metrics"]) == {"same", "default", "one_device", "mirrored", "central_storage"}
    for kind, metrics in found["metrics"].items():
        assert found["examples"][kind] == found["num_examples"] > 20, kind
        assert metrics == pytest.approx(found["expected"], rel=1e-5, abs=1e-6), kind


def test_training_goes_on_without_a_worker_that_was_killed(cases: Cases) -> None:
    """Every example is seen, those of the lost range perhaps twice: another worker may have been asked for them."""
    found = cases["worker_lost"]
    times = {int(times): examples for times, examples in found["seen"]}
    assert 0 not in times and sum(times.values()) == 1200
    assert found["global_step"] >= 300
    assert set(times) <= {1, 2}
    assert found["later"] >= 20


def test_steps_that_were_taken_twice_after_a_loss_are_counted_and_said(cases: Cases, messages: Messages) -> None:
    found = cases["worker_lost"]
    twice = found["global_step"] - 300
    (said,) = [line for line in found["said"] if " repeated. " in line]
    assert f" {twice} " in said
    messages.same("log", said, hide=r"\d+ steps? (was|were)|(?<=taken )\d+")
    seen_twice = {int(times): examples for times, examples in found["seen"]}.get(2, 0)
    assert seen_twice in (4 * twice, 4 * (twice + 1))  # one may have been killed between its update and the count
    assert LOST in found["said"] and not [line for line in found["said"] if "Error" in line]


def test_a_parameter_server_that_was_killed_is_a_lost_peer(cases: Cases) -> None:
    expected = "A parameter server was lost (ps:1), and with it the variables that it held"
    assert cases["server_lost"]["error"] == expected


def test_the_command_gives_the_variables_of_a_single_process_with_one_worker(
    tmp_path: Path, command_line: CommandLine
) -> None:
    small = ["train.max_steps=40", "tracking=none", "checkpoint.keep_max=null"]
    served_by = ["strategy=parameter_server", "cluster.num_workers=1", "cluster.num_ps=1"]
    served_by += ["eval_strategy=mirrored", "eval_strategy.virtual_devices=2"]  # the coordinator's, beside the cluster
    ran = command_line(*served_by, *small, f"model_dir={tmp_path / 'served'}", cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (tmp_path / "alone").mkdir()
    file = tmp_path / "alone.yaml"
    schema.save(parsing.parse(composed([*small, f"model_dir={tmp_path / 'alone'}"])), file)
    assert main.main([str(file)], inline=True) == 0
    served, alone = (reader.Reader(str(tmp_path / name / "model.ckpt-40")) for name in ("served", "alone"))
    assert served.names() == alone.names()
    for name in alone.names():
        a, b = served.get(name), alone.get(name)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max(initial=0)), err_msg=name)
    (result,) = events_in(tmp_path / "alone", "result")
    summary = json.loads((tmp_path / "served" / "summary.json").read_text())
    assert summary["metrics"] == pytest.approx(result["metrics"], rel=1e-4)
    events = events_in(tmp_path / "served", "evaluated")
    assert [event["examples"] for event in events] == [360]


@pytest.mark.slow
@pytest.mark.processes
def test_a_cluster_on_one_core_trains(tmp_path: Path) -> None:
    """As under Slurm with one CPU for each task. TensorFlow's servers then had one thread, and no step ended."""
    core = min(os.sched_getaffinity(0))
    served_by = ["strategy=parameter_server", "cluster.num_workers=2", "cluster.num_ps=1"]
    command = [sys.executable, "-m", "runner", *served_by, "train.max_steps=20", "model.params.network=mlp"]
    ran = subprocess.run(
        [*command, "tracking=none", f"model_dir={tmp_path}/run", "input.eval=null"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 20
