"""Several workers, each a process: the numbers of one, no example lost or seen twice, nobody waits for ever."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from runner.system.files import RUNNER_FILES
from tests.support.adapted_models import batches as adapted_batches
from tests.support.adapted_models import model_fn as adapted
from tests.support.checkpoints import list_checkpoints
from tests.support.gang import DIES_AT, Gang, environments, slow_way, write_lines
from tests.support.keras_rows import MEETING
from tests.support.keras_rows import batches as batches_of
from tests.support.line import read_events, steps_of
from tests.support.measured import journaled, summarised_values, train_measured
from tests.support.messages import Messages
from tests.support.models import FETCHED, STYLES, Rows, eval_input, texts_beside, train_input
from tests.support.replica_programs import MORE_OF_WORKERS, OF_WORKERS, REFUSED, center_loss, trained
from tests.support.screen import line_of
from tests.support.sparse_models import SUMMED, most_rows
from tests.support.weighted_models import model_of, of_two, weighted_input
from tests.support.worker_orders import gradients, trained_and_evaluated, trained_tables

pytestmark = pytest.mark.timeout(900)  # the first waits for two gangs

TWO = (
    "native", "summed", "drawn_seed", "uneven", "without_data", "nothing_at_all", "own_counted",
    "own_raised", "own_ended_early", "files_raised",
    "of_service", "unknown_length", "measured", "stopped_by_one", "slow_worker", "slow_evaluation", "fetched",
    "undisturbed", "stopped_early", "not_finite", "not_finite_variables", "sparse", "weighted_losses",
    "programs", "orders", "streams", "keras_promises", "one_file", "metrics_of_files", "pairs",
    "undying", "dying",
)  # fmt: skip
SLOW_TWO = (
    "keras_weights", "by_replicas", "in_turn", "reduced_on_a_plateau", "accumulated", "half_precision", "packed",
    "more_programs", "callbacks",
)  # fmt: skip
THREE = ("uneven", "dense_at_times", "files", "read_on", "classic", "without_data", "own_resumed")
"""In gangs of their own, for `make test-slow`: much of it is what the cases of TWO say, once more."""


IDS = [0, 1, 2, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23]
"""What the files of write_lines hold."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gangs")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Gang]:
    """Two workers; the last case kills the second of them."""
    write_lines(folder / "two")
    gang = Gang(2, folder / "two", TWO)
    codes = gang.wait()
    assert codes[1] == -9 and codes[0] not in (0, -9), gang.output(0) + gang.output(1)
    yield gang


@pytest.fixture(scope="module")
def three(folder: Path, two: Gang) -> Iterator[Gang]:
    """Three workers, which go on reading what two have begun."""
    shutil.copytree(two.folder / "dying", folder / "three" / "dying")
    write_lines(folder / "three")
    yield Gang(3, folder / "three", THREE).finished()


@pytest.fixture(scope="module")
def again(folder: Path, two: Gang) -> Iterator[Gang]:
    """Two workers, after one of the first two was killed."""
    shutil.copytree(two.folder / "dying", folder / "again" / "dying")
    yield Gang(2, folder / "again", ["resumed"]).finished()


@pytest.fixture(scope="module")
def slow_two(folder: Path) -> Gang:
    return Gang(2, folder / "slow_two", SLOW_TWO).finished()


def alone(folder: Path, style: str, strategy: Any = None, **settings: Any) -> dict[str, Any]:
    """As tests.support.worker_cases.trained, in this process."""
    estimator = Estimator(STYLES[style], folder, RunConfig(train_distribute=strategy, **settings))
    spec = TrainSpec(train_input(12, dtype="float64"), max_steps=20)
    result = train_and_evaluate(estimator, spec, EvalSpec(eval_input(8, dtype="float64")))
    variables = {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}
    return {**variables, **{f"eval/{name}": value for name, value in result.metrics[""].items()}}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    for name, value in expected.items():
        # Metrics of v1 and the learning rate of Keras are float32 by themselves.
        loose = 1e-6 if name in ("eval/mae",) else tolerance
        np.testing.assert_allclose(found[name], value, rtol=loose, atol=loose, err_msg=name)


def test_one_process_and_two_workers_come_to_the_same(two: Gang, tmp_path: Path) -> None:
    assert_trained_as_alone("native", two, tmp_path)


def test_what_a_hook_of_each_worker_logs_is_that_of_the_chief_once(two: Gang) -> None:
    steps = steps_of(two.folder / "native", "train/seen")
    assert steps == sorted(set(steps)) and steps[-1] == 20
    logged = [event for event in read_events(two.folder / "native") if event.tag == "train/seen"]
    assert [event.value for event in logged] == steps


@pytest.mark.slow
def test_one_process_two_replicas_and_three_workers_come_to_the_same(three: Gang, tmp_path: Path) -> None:
    expected = assert_trained_as_alone("classic", three, tmp_path)
    mirrored = alone(tmp_path / "mirrored", "classic", tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]))
    assert_equal(mirrored, expected)


@pytest.mark.parametrize(
    "case",
    [
        "trained_last",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("nothing_last", "evaluated_last", "interrupted_last", "both_last")
        ),
    ],
)
def test_no_worker_ends_before_the_others_have_its_last_answer(case: str, tmp_path: Path) -> None:
    chief, other = environments(2)
    seen = json.loads(chief["TF_CONFIG"])  # in a ring of two, the chief gets the last message
    with slow_way(seen["cluster"]["worker"][0]) as address:
        seen["cluster"]["worker"] = [address]
        gang = Gang(2, tmp_path, [case], places=[{"TF_CONFIG": json.dumps(seen)}, other]).finished()
    assert [found.get("step", found.get("global_step")) for found in gang.results(case)] == [2, 2]


def test_what_keras_promises_is_kept_on_two_workers_and_its_layers_learn_what_the_chiefs_do(
    two: Gang, tmp_path: Path
) -> None:
    def ended(model_fn: Any, batches: Callable[[int, int], tf.data.Dataset], size: int) -> dict[str, Any]:
        trainer = Estimator(model_fn, config=RunConfig(str(tmp_path / str(len(expected))), tf_random_seed=1))
        trainer.train(lambda: batches(size, 3))
        return trainer.evaluate(lambda: batches(size, 1))

    expected: dict[str, Any] = {}
    for row in MEETING:
        metrics = ended(lambda features, labels, mode, row=row: row.build(), functools.partial(batches_of, row), 12)
        expected |= {f"{row.id}/{name}": value for name, value in metrics.items()}
    metrics = ended(functools.partial(adapted, params={}), lambda *size: adapted_batches(*size)(), 4)
    for found in two.results("keras_promises"):
        assert_equal(found, {**expected, "adapted": metrics["loss"]}, 2e-6)


@pytest.mark.slow
def test_a_keras_model_is_evaluated_before_its_first_step_by_all_workers_or_the_chief(slow_two: Gang) -> None:
    for found in slow_two.results("keras_weights"):
        assert found["all"] == found["chief"] == 17.5, found  # the mean of the ids' squares


def assert_trained_as_alone(style: str, gang: Gang, folder: Path) -> dict[str, Any]:
    expected = alone(folder / "alone", style)
    for found in gang.results(style):
        assert_equal(found, expected)
        assert int(found["examples"]) == 200  # four epochs: batches of 12, the last of 2
        assert len(found["losses"]) == 20
    return expected


@pytest.mark.parametrize("style", ["native", "classic"])
def test_gradients_that_two_workers_give_each_other_whole_have_the_bits_of_the_ring(style: str, two: Gang) -> None:
    for found in two.results("summed"):
        whole, ring = (
            {
                name.removeprefix(f"{style}/{kind}/"): value
                for name, value in found.items()
                if f"{style}/{kind}/" in name
            }
            for kind in ("whole", "ring")
        )
        assert "CollectiveGatherV2" in whole.pop("collectives")
        assert ring.pop("collectives").tolist() == ["CollectiveReduceV2"]
        assert len(whole["losses"]) == 20
        for name, value in whole.items():
            np.testing.assert_array_equal(value, ring[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["native", "classic"])
def test_gradients_of_late_layers_are_sent_while_those_of_early_ones_are_computed(style: str, slow_two: Gang) -> None:
    """With `strategy.bytes_per_pack`, a message waits for the gradients in it, and not for those of layers before."""
    for found in slow_two.results("packed"):
        last_layer, *others = found[style].tolist()
        assert 0 < last_layer < max(others) <= found[f"{style}/all"]


@pytest.mark.parametrize("style", ["native", "classic"])
def test_what_training_reports_is_over_the_examples_of_both_workers(style: str, two: Gang, tmp_path: Path) -> None:
    train_measured(tmp_path, RunConfig(log_step_count_steps=2, save_summary_steps=1, train_metrics=True), style)
    chief, _ = two.results("measured")
    for step, values in journaled(tmp_path).items():
        for name, tolerance in (("mae", 1e-10), ("kept", 1e-10), ("pair", 1e-6)):  # metrics of v1 are float32
            found = float(chief[f"{style}/{step}/train/{name}"])
            assert found == pytest.approx(values[f"train/{name}"], rel=tolerance), (step, name)
    for tag in ("new", "old"):  # events are float32
        expected = summarised_values(tmp_path / "model", tag)
        summaries = {step: float(chief[f"{style}/{step}/{tag}"]) for step in expected}
        assert sorted(summaries) == [1, 2, 3, 4, 5, 6] and summaries == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_model_fn_sees_the_replicas_of_all_workers_whenever_it_is_called(slow_two: Gang) -> None:
    for found in slow_two.results("by_replicas"):
        assert float(found["w"]) == pytest.approx(2 * 0.1 * int(found["replicas"]), rel=1e-6)
        assert int(found["replicas"]) == 2


@pytest.mark.slow
def test_a_callback_of_keras_is_called_on_the_chief_alone(slow_two: Gang, tmp_path: Path) -> None:
    """22 examples in batches of 8: the last one is smaller, and smaller still on the second worker."""
    alone: list[float] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: alone.append(logs["loss"]))
    estimator = Estimator(STYLES["native"], tmp_path, RunConfig(tf_random_seed=5))
    estimator.train(eval_input(8), hooks=[callback], max_epochs=2)
    chief, worker = slow_two.results("callbacks")
    assert chief["losses"].tolist() == pytest.approx(alone, rel=1e-6)
    assert chief["batches"].tolist() == [0, 1, 2, 0, 1, 2]
    assert worker["losses"].tolist() == worker["batches"].tolist() == []


def test_workers_for_whom_no_seed_was_given_draw_the_same(two: Gang) -> None:
    chief, worker = two.results("drawn_seed")
    assert chief["seed"] == worker["seed"]


def test_a_checkpoint_of_two_workers_is_read_by_one_process(two: Gang, tmp_path: Path) -> None:
    assert_read("native", two, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_three_workers_is_read_by_one_process(three: Gang, tmp_path: Path) -> None:
    assert_read("classic", three, tmp_path)


def assert_read(style: str, gang: Gang, folder: Path) -> None:
    shutil.copytree(gang.folder / style, folder / "copy")
    config = RunConfig(tf_random_seed=1)
    estimator = Estimator(STYLES[style], folder / "copy", config)
    metrics = estimator.evaluate(eval_input(8, dtype="float64"))
    assert metrics["loss"] == pytest.approx(float(gang.results(style)[0]["eval/loss"]), rel=1e-10)


def test_every_strategy_of_evaluation_beside_two_workers_gives_the_numbers_of_one_device(
    two: Gang, tmp_path: Path
) -> None:
    """Also of a compiled model: test_strategy_pairs.py."""
    estimator = Estimator(STYLES["classic"], tmp_path, RunConfig(tensorboard=False))
    estimator.train(train_input(12, dtype="float64"), steps=6)
    metrics = estimator.evaluate(eval_input(8, dtype="float64"))
    for found in two.results("pairs"):
        for name in estimator.get_variable_names():
            expected = estimator.get_variable_value(name)
            np.testing.assert_allclose(found[name], expected, rtol=1e-10, atol=1e-10, err_msg=name)
        for kind in ("same", "default", "one_device", "mirrored", "central_storage"):
            for name, value in metrics.items():
                tolerance = 1e-6 if name == "mae" else 1e-10  # v1 metrics are float32
                assert float(found[f"{kind}/{name}"]) == pytest.approx(value, rel=tolerance), (kind, name)


def test_no_example_of_uneven_workers_is_lost_or_seen_twice(two: Gang, messages: Messages) -> None:
    for found in two.results("uneven"):  # 7 and 2 examples, in batches of 2
        assert found["ids"].tolist()[:-1] == [[0, 1, 7, 8], [2, 3], [4, 5], [6]]
        messages.same("reason", str(found["reason"]))


@pytest.mark.slow
def test_no_example_of_three_uneven_workers_is_lost_or_seen_twice(three: Gang) -> None:
    for found in three.results("uneven"):  # 7, 2 and 5
        assert found["ids"].tolist()[:-1] == [[0, 1, 7, 8, 9, 10], [2, 3, 11, 12], [4, 5, 13], [6]]


def test_a_worker_without_data_waits_for_nobody(two: Gang) -> None:
    for found in two.results("without_data"):
        assert found["ids"].tolist()[:-1] == [[0, 1], [2, 3], [4]]


@pytest.mark.slow
def test_of_three_workers_the_one_without_data_waits_for_nobody(three: Gang) -> None:
    for found in three.results("without_data"):
        assert found["ids"].tolist()[:-1] == [[0, 1, 5, 6], [2, 3, 7], [4]]


def test_workers_that_all_have_no_data_are_refused_at_once(two: Gang, messages: Messages) -> None:
    for found in two.results("nothing_at_all"):
        messages.same("error", str(found["said"]))


@pytest.mark.slow
def test_input_of_each_workers_own_goes_on_at_the_next_example(three: Gang) -> None:
    for found in three.results("own_resumed"):
        whole = found["whole"].tolist()[:-1]
        assert found["pieces"].tolist()[:-1] == whole
        assert sorted(id for step in whole for id in step) == list(range(25))
    folder = three.folder / "own_resumed" / "pieces" / RUNNER_FILES
    saved = {file.name for file in folder.glob("model.ckpt-4.input-*.index")}
    assert saved == {f"model.ckpt-4.input-{worker}.index" for worker in range(3)}
    assert not list(folder.glob(".model*"))


def test_input_of_each_workers_own_goes_on_from_a_count_of_its_batches(two: Gang) -> None:
    for found in two.results("own_counted"):
        whole = found["whole"].tolist()[:-1]
        assert found["pieces"].tolist()[:-1] == whole
        assert sorted(id for step in whole for id in step) == list(range(17))
    folder = two.folder / "own_counted" / "pieces" / RUNNER_FILES
    states = {step: len(list(folder.glob(f"model.ckpt-{step}.input-*.index"))) for step in (2, 3, 4)}
    assert states == {2: 0, 3: 2, 4: 0} and not list(folder.glob(".model*"))


@pytest.mark.parametrize("longer", ["first", "second"])
def test_more_passes_begin_on_each_worker_after_its_own_last_batch(two: Gang, longer: str) -> None:
    for found in two.results("own_raised"):
        passes = found[longer].tolist()[:-1]
        assert [sorted(id for step in steps for id in step) for steps in passes] == [list(range(10))] * 2


def test_more_passes_over_files_begin_on_each_worker_after_its_own_last_batch(two: Gang) -> None:
    for found in two.results("files_raised"):
        for each in ("first", "second"):
            steps = found[each].tolist()[:-1]
            assert sorted(id for step in steps for id in step) == IDS


def test_a_worker_goes_on_where_it_was_after_the_data_of_the_chief_has_ended(two: Gang) -> None:
    for found in two.results("own_ended_early"):
        whole = found["whole"].tolist()[:-1]
        assert found["pieces"].tolist()[:-1] == whole
        assert sorted(id for step in whole for id in step) == sorted(10 * list(range(8)))


def test_a_tf_data_service_gives_each_example_to_one_of_the_workers(two: Gang) -> None:
    for found in two.results("of_service"):
        assert sorted(id for step in found["whole"][:-1] for id in step) == list(range(11))
        first, last = found["pieces"][:-1]
        assert first == 2 < last  # how many steps there are is a matter of who asks first


def test_data_of_unknown_length_ends_for_all(two: Gang) -> None:
    for found in two.results("unknown_length"):
        assert found["ids"].tolist()[:-1] == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17], [19]]


@pytest.mark.slow
def test_batches_of_the_functions_own_are_taken_in_turn(slow_two: Gang) -> None:
    for found in slow_two.results("in_turn"):
        assert found["ids"].tolist()[:-1] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_stop_that_one_worker_asks_for_stops_all(two: Gang, messages: Messages) -> None:
    chief, worker = two.results("stopped_by_one")
    assert int(chief["step"]) == 9
    messages.same("reason", str(chief["reason"]))
    assert (int(worker["step"]), str(worker["reason"])) == (9, "enough")


def test_the_chiefs_clock_decides_where_a_worker_is_slow(two: Gang) -> None:
    chief, worker = two.results("slow_worker")
    assert chief["saved"].tolist() == worker["saved"].tolist()
    assert chief["saved"][-1] == 600 and len(chief["saved"]) > 2  # by the clock, between the first and the last
    undisturbed = two.results("undisturbed")[0]
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(worker[name], value, err_msg=name)


def test_early_stopping_ends_all_workers(two: Gang, messages: Messages) -> None:
    chief, worker = two.results("stopped_early")
    assert int(chief["step"]) == int(worker["step"]) == 4
    assert str(chief["reason"]) == str(worker["reason"])
    messages.same("reason", str(chief["reason"]), hide="(?<=best )\\S+")


@pytest.mark.slow
def test_all_workers_reduce_the_learning_rate_before_the_same_step(slow_two: Gang) -> None:
    chief, worker = slow_two.results("reduced_on_a_plateau")
    first = chief["rates"][0]
    # After the steps 0 to 8: the evaluations of 4 and 6 are no better than the first, of step 2.
    assert (chief["rates"] / first).tolist() == pytest.approx([1, 1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25])
    for name, value in chief.items():
        np.testing.assert_array_equal(worker[name], value, err_msg=name)


@pytest.mark.parametrize("style", ["native", "classic"])
def test_a_loss_that_is_not_finite_on_one_worker_ends_all_and_names_its_step(
    style: str, two: Gang, messages: Messages
) -> None:
    for found in two.results("not_finite"):
        messages.same("error", str(found[style]))


def test_variables_that_became_non_finite_are_saved_by_no_worker(two: Gang, messages: Messages) -> None:
    results = two.results("not_finite_variables")
    assert [int(results[0][f"{policy}_step"]) for policy in ("stop", "rollback")] == [2, 2]
    for found in results:
        for policy in ("stop", "rollback"):  # step 3 is bad each time, so that the fourth time ends the run
            messages.same(policy, str(found[policy]))


@pytest.mark.parametrize("model_fn", SUMMED)
def test_gradients_of_uneven_batches_are_added_up(model_fn: Any, two: Gang, tmp_path: Path) -> None:
    """Sparse ones in small tables and in large ones, whose rows travel; dense ones whose shape only a step knows. Of
    some batches one worker has no example.
    """
    estimator = Estimator(model_fn, tmp_path, RunConfig())
    estimator.train(train_input(6, 19, "float64"), max_steps=8)
    for found in two.results("sparse"):
        for name in estimator.get_variable_names():
            np.testing.assert_allclose(
                found[f"{model_fn.__name__}/{name}"], estimator.get_variable_value(name), 1e-10, 1e-10, err_msg=name
            )
        assert found["native_lazy_adam/largest message"] < 1000, "a whole table travels"


@pytest.mark.slow  # the only one that would need three workers
def test_tables_of_which_most_is_touched_are_summed_whole_over_three_workers(three: Gang, tmp_path: Path) -> None:
    """In some steps, and by rows in the others; of some batches a worker has no example."""
    estimator = Estimator(most_rows, tmp_path, RunConfig())
    estimator.train(train_input(6, 19, "float64"), max_steps=12)
    for found in three.results("dense_at_times"):
        assert {"CollectiveReduceV2", "CollectiveGatherV2"} <= set(found["sent in branches"])
        for name in estimator.get_variable_names():
            expected = estimator.get_variable_value(name)
            np.testing.assert_allclose(found[name], expected, 1e-10, 1e-10, err_msg=name)
            np.testing.assert_allclose(found[f"whole/{name}"], expected, 1e-10, 1e-10, err_msg=name)


def test_sums_and_weighted_means_are_those_of_the_global_batch(two: Gang, tmp_path: Path) -> None:
    estimator = Estimator(model_of(of_two), tmp_path, RunConfig()).train(weighted_input())
    for found in two.results("weighted_losses"):
        np.testing.assert_allclose(found["kernel"], estimator.get_variable_value("kernel"), rtol=1e-6)


def assert_programs_as_alone(gang: Gang, case: str, programs: Sequence[Callable[..., Any]], folder: Path) -> None:
    for program in programs:
        expected = trained(program, folder / program.__name__, RunConfig())
        for found in gang.results(case):
            for name, value in expected.items():
                key = f"{program.__name__}/{name}"
                np.testing.assert_allclose(found[key], value, rtol=1e-10, atol=1e-10, err_msg=key)


def test_what_model_fn_writes_by_itself_is_that_of_one_device(two: Gang, tmp_path: Path) -> None:
    assert_programs_as_alone(two, "programs", OF_WORKERS, tmp_path)
    for found in two.results("programs"):
        assert repr(REFUSED[center_loss]) in str(found["center_loss"])


@pytest.mark.slow
def test_more_of_what_model_fn_writes_by_itself_is_that_of_one_device(slow_two: Gang, tmp_path: Path) -> None:
    assert_programs_as_alone(slow_two, "more_programs", MORE_OF_WORKERS, tmp_path)


def test_an_order_of_a_worker_s_own_changes_no_number_or_is_refused(two: Gang, tmp_path: Path) -> None:
    expected = trained_and_evaluated(gradients, tmp_path, RunConfig(tf_random_seed=1))
    for found in two.results("orders"):
        for name, value in expected.items():
            np.testing.assert_allclose(found[f"gradients/{name}"], value, rtol=1e-9, atol=1e-10, err_msg=name)
        assert "v1.losses.mean_squared_error(" in str(found["losses/refused"])  # the line
        assert "'mean_1/total'" in str(found["metrics/refused"])


@pytest.mark.slow
@pytest.mark.processes
def test_machines_that_hash_texts_differently_train_the_same_model_or_none(tmp_path: Path) -> None:
    """Processes of their own, each in the environment of another machine."""
    num_workers = 2
    places = []
    for worker, place in enumerate(environments(num_workers)):
        home = tmp_path / f"home of {worker}"
        home.mkdir()
        places.append({**place, "PYTHONHASHSEED": str(worker), "HOME": str(home), "LANG": ("C", "C.UTF-8")[worker % 2]})
    gang = Gang(num_workers, tmp_path / "gang", ["tables"], prefix=("env",), places=places).finished()
    expected = trained_tables(tmp_path / "alone", RunConfig(tf_random_seed=1), is_sorted=True)
    for found in gang.results("tables"):
        assert "'embedding/embeddings'" in str(found["set/refused"])
        for name, value in expected.items():
            np.testing.assert_allclose(found[f"sorted/{name}"], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_stream_that_workers_read_in_other_orders_is_refused_where_it_begins_to_differ(two: Gang) -> None:
    for found in map(dict, two.results("streams")):
        said = {name: str(text) for name, text in found.items()}
        assert said["augmented"] == ""
        for name, block, checkpoint in (("later", "train", 0), ("eval", "eval", 8)):
            assert f"input.{block}.shard=examples" in said[name] and "labels" in said[name]
            assert said[name].endswith(f"model.ckpt-{checkpoint}")


def test_one_worker_may_ask_for_a_loss_that_no_other_needs(two: Gang) -> None:
    assert [len(found["asked"]) for found in two.results("weighted_losses")] == [4, 0]


@pytest.mark.slow
def test_gradients_are_accumulated_over_workers(slow_two: Gang, tmp_path: Path) -> None:
    expected = alone(tmp_path, "native")
    for found in slow_two.results("accumulated"):
        assert_equal(found, expected)


@pytest.mark.slow
def test_an_overflow_on_one_worker_leaves_the_update_out_on_all(slow_two: Gang) -> None:
    chief, worker = slow_two.results("half_precision")
    assert float(chief["loss_scale/dynamic_scale"]) < 2**15
    for name in chief:
        np.testing.assert_array_equal(chief[name], worker[name], err_msg=name)


def test_metrics_count_each_example_once_wherever_it_is_read(two: Gang) -> None:
    for worker, found in enumerate(two.results("metrics_of_files")):
        for kind in ("all", "chief"):
            for name in ("loss", "each", "kept", "pair"):
                assert float(found[f"{kind}/{name}"]) == pytest.approx(np.mean(IDS), rel=1e-6), (worker, kind, name)
    assert two.results("metrics_of_files")[1]["predicted"].tolist() == IDS


def test_fewer_files_than_workers_are_read_by_all_and_it_is_said(two: Gang, messages: Messages) -> None:
    for found in two.results("one_file"):
        steps = found["ids"].tolist()[:-1]
        assert [len(step) for step in steps] == [6, 1]
        assert sorted(id for step in steps for id in step) == list(range(7))
    messages.same("stderr", line_of(two.output(0), "shard=files"))


@pytest.mark.slow
def test_files_that_are_divided_give_each_example_once_an_epoch_and_a_worker_reads_its_own_only(three: Gang) -> None:
    """The files of the others have no ids on its disk."""
    for found in three.results("files"):
        seen = [id for step in found["ids"].tolist()[:-1] for id in step]
        assert sorted(seen) == sorted(IDS * 2)
        assert float(found["loss"]) == pytest.approx(np.mean([2.0**id for id in IDS]))


def test_the_others_learn_that_a_worker_was_killed(two: Gang, messages: Messages) -> None:
    messages.same("stderr", line_of(two.output(0), "errors.PeerLost: "))
    saved = {info.step for info in list_checkpoints(two.folder / "dying" / "native")}
    assert max(saved) == DIES_AT // 4 * 4


def test_a_run_that_was_killed_ends_as_the_undisturbed_one_bit_by_bit(two: Gang, again: Gang) -> None:
    for found in again.results("resumed"):
        for name, value in two.results("undying")[0].items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_three_workers_go_on_where_two_have_stopped(two: Gang, three: Gang) -> None:
    steps = [json.loads((three.folder / "dying" / f"step-{step}.json").read_text()) for step in range(1, 13)]
    for epoch in range(3):
        seen = [id for step in steps[4 * epoch : 4 * epoch + 4] for id in step]
        assert sorted(seen) == list(range(24))
    assert not (two.folder / "dying" / "step-8.json").exists()  # the first two got as far as step 7


def test_a_hook_of_the_chief_fetches_the_examples_of_both_workers(two: Gang, tmp_path: Path) -> None:
    in_training, in_evaluation = Rows(*FETCHED), Rows(*FETCHED)
    estimator = Estimator(texts_beside, tmp_path, RunConfig(log_step_count_steps=4, tf_random_seed=1))
    estimator.train(train_input(12, dtype="float64"), hooks=[in_training], steps=9)
    estimator.evaluate(eval_input(4, dtype="float64"), hooks=[in_evaluation])
    found, of_other = two.results("fetched")
    assert of_other["steps"].size == 0, "no hook of another worker is called"
    assert str(found["given up"]) == "enough"
    assert str(of_other["given up"]) == "another worker ended the evaluation early"
    assert found["loss"] == of_other["loss"]
    assert found["sizes"].tolist() == [8, 8, 6], "a batch of each worker at a time"
    assert found["steps"].tolist() == in_training.steps == [4, 8]
    for name in FETCHED:
        for kind, rows in (("train", in_training), ("eval", in_evaluation)):
            expected = rows.of(name)
            if expected.dtype == object:
                assert found[f"{kind}/{name}"].tolist() == expected.tolist()
            else:
                np.testing.assert_allclose(found[f"{kind}/{name}"], expected, rtol=1e-9)


def test_workers_evaluate_in_loops_of_their_own_length(two: Gang) -> None:
    """One worker takes 0.16 s for each batch, and so shorter loops."""
    for result in two.results("slow_evaluation"):
        np.testing.assert_array_equal(result["first"], result["second"])
        np.testing.assert_array_equal(result["first"], two.results("slow_evaluation")[0]["first"])
