"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops

from runner import Estimator, RunConfig, build_strategy
from runner.classic.contrib import distribute as contrib_distribute
from runner.config.schema import ConfigError
from runner.distribute import strategy
from runner.distribute.strategy import split_cpu
from tests.support.line import line, native_line
from tests.support.messages import Messages


def test_default_is_no_strategy() -> None:
    assert build_strategy("default") is None


def test_one_device_takes_the_first() -> None:
    strategy = build_strategy("one_device", devices=["CPU:1"])
    assert isinstance(strategy, tf.distribute.OneDeviceStrategy)
    (device,) = strategy.extended.worker_devices
    assert device.endswith("CPU:1")


def test_mirrored_takes_the_virtual_devices() -> None:
    strategy = build_strategy("mirrored", virtual_devices=2)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 2


def test_mirrored_takes_the_devices_given() -> None:
    strategy = build_strategy("mirrored", devices=["/cpu:1"])
    assert strategy is not None and strategy.num_replicas_in_sync == 1


def test_without_virtual_devices_or_gpus_there_is_one_replica() -> None:
    strategy = build_strategy("mirrored")
    assert strategy is not None and strategy.num_replicas_in_sync == 1


def test_central_storage_keeps_variables_on_the_cpu() -> None:
    strategy = build_strategy("central_storage", virtual_devices=2)
    assert isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        assert tf.Variable(1.0).device.endswith("CPU:0")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nccl", tf.distribute.NcclAllReduce),
        ("hierarchical_copy", tf.distribute.HierarchicalCopyAllReduce),
        ("reduction_to_one_device", tf.distribute.ReductionToOneDevice),
    ],
)
def test_cross_device_ops_and_packs_reach_the_strategy(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def mirrored(devices: Any, cross_device_ops: Any) -> str:
        given.update(devices=devices, ops=cross_device_ops)
        return "strategy"

    monkeypatch.setattr(tf.distribute, "MirroredStrategy", mirrored)
    monkeypatch.setattr(strategy, "_choose_devices", lambda *args: ["/gpu:0", "/gpu:1"])
    monkeypatch.setattr(strategy, "_check_devices", lambda devices: None)
    packs = 1 if name == "reduction_to_one_device" else 3
    found: Any = build_strategy("mirrored", cross_device_ops=name, num_packs=packs)
    assert found == "strategy" and given["devices"] == ["/gpu:0", "/gpu:1"]
    assert isinstance(given["ops"], kind)


def test_unknown_name_is_refused_with_the_known_ones(messages: Messages) -> None:
    with messages.raised(ValueError):
        build_strategy("mirored")


def test_unknown_cross_device_ops_are_refused_with_the_known_ones(messages: Messages) -> None:
    with messages.raised(ValueError):
        build_strategy("mirrored", cross_device_ops="ring")


def test_unknown_device_is_refused_with_those_that_are_there(messages: Messages) -> None:
    with messages.raised(ValueError):
        build_strategy("mirrored", devices=["CPU:0", "GPU:7"])


def test_more_gpus_than_there_are_is_refused(messages: Messages) -> None:
    with messages.raised(ValueError):
        build_strategy("mirrored", num_gpus=3)


def test_cpu_can_be_split_the_same_way_again() -> None:
    tf.config.list_logical_devices()
    split_cpu(2)
    split_cpu(1)
    split_cpu(None)
    assert len(tf.config.list_logical_devices("CPU")) == 2


def test_workers_send_what_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second strategy of several workers in one process hangs, so its options are looked at without one."""
    monkeypatch.setattr(
        tf.distribute, "MultiWorkerMirroredStrategy", lambda communication_options: communication_options
    )
    options: Any = build_strategy("multi_worker", communication="ring", timeout_secs=30, bytes_per_pack=1000)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    assert (options.bytes_per_pack, options.timeout_seconds, options.implementation) == (1000, 30, ring)


def test_a_cpu_that_is_in_use_cannot_be_split_any_more(messages: Messages) -> None:
    """As by a module of the user's that makes a tensor while it is imported."""
    tf.constant(1.0)
    with messages.raised(ConfigError):
        split_cpu(3)


def test_a_way_to_sum_over_gpus_is_refused_where_there_is_none(messages: Messages) -> None:
    with messages.raised(ConfigError):
        build_strategy("mirrored", virtual_devices=2, cross_device_ops="nccl")
    with messages.raised(ConfigError):
        build_strategy("multi_worker", communication="nccl")


def test_a_way_to_sum_is_said_to_have_no_effect_with_one_device(
    caplog: pytest.LogCaptureFixture, messages: Messages
) -> None:
    build_strategy("mirrored", devices=["/cpu:0"], cross_device_ops="hierarchical_copy", num_packs=3)
    messages.logged(caplog, "strategy.")


class CountedOps(tf.distribute.ReductionToOneDevice):
    """A user's own way to sum."""

    calls = 0

    def batch_reduce_implementation(self, *args: Any, **kwargs: Any) -> Any:
        CountedOps.calls += 1
        return super().batch_reduce_implementation(*args, **kwargs)


def test_packs_without_a_way_to_sum_that_has_them_are_refused(messages: Messages) -> None:
    for ops in ("auto", "reduction_to_one_device", f"{__name__}.CountedOps"):
        with messages.raised(ConfigError):
            build_strategy("mirrored", virtual_devices=2, cross_device_ops=ops, num_packs=2)


@pytest.mark.parametrize("model_fn", [line, native_line])
def test_gradients_are_summed_in_as_many_packs_as_are_asked_for(
    model_fn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    pack = cross_device_ops._pack_tensors

    def noted(gradients: Any, packs: int) -> Any:
        seen.append(packs)
        return pack(gradients, packs)

    monkeypatch.setattr(cross_device_ops, "_pack_tensors", noted)
    weights = []
    for packs in (1, 3, 0):
        seen.clear()
        found = build_strategy("mirrored", virtual_devices=2, cross_device_ops="hierarchical_copy", num_packs=packs)
        config = RunConfig(train_distribute=found, save_summary_steps=None)
        estimator = Estimator(model_fn, tmp_path / str(packs), config)
        estimator.train(lambda: tf.data.Dataset.from_tensors(([1.0, 2.0], [2.0, 4.0])).repeat(), max_steps=2)
        weights.append([float(estimator.get_variable_value(name)) for name in estimator.get_variable_names()])
        assert set(seen) == {packs}
    assert weights[1:] == [weights[0]] * 2 and any(weights[0])


@pytest.mark.parametrize("model_fn", [line, native_line])
def test_the_way_to_sum_that_was_chosen_is_used_with_the_same_numbers(model_fn: Any, tmp_path: Path) -> None:
    weights = []
    for ops in ("auto", "hierarchical_copy", f"{__name__}.CountedOps"):
        CountedOps.calls = 0
        found = build_strategy("mirrored", virtual_devices=2, cross_device_ops=ops)
        config = RunConfig(train_distribute=found, save_summary_steps=None)
        estimator = Estimator(model_fn, tmp_path / ops, config)
        data = tf.data.Dataset.from_tensors(([1.0, 2.0], [2.0, 4.0]))
        estimator.train(lambda data=data: data.repeat(), max_steps=3)
        weights.append([float(estimator.get_variable_value(name)) for name in estimator.get_variable_names()])
        assert bool(CountedOps.calls) == ops.endswith("CountedOps")
    assert weights[1] == pytest.approx(weights[0]) and weights[2] == pytest.approx(weights[0])
    assert any(weights[0])


@pytest.mark.parametrize("argument", ["train_distribute", "eval_distribute"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: tf.distribute.MirroredStrategy(["/gpu:0", "/gpu:1"]),
        lambda: tf.distribute.OneDeviceStrategy("/gpu:3"),
        lambda: contrib_distribute.MirroredStrategy(num_gpus=2),
    ],
    ids=["mirrored", "one_device", "contrib"],
)
def test_devices_that_do_not_exist_are_refused_before_the_first_step(
    build: Callable[[], Any], argument: str, tmp_path: Path
) -> None:
    # TensorFlow itself would wait for them without an end.
    with pytest.raises(ValueError) as caught:
        Estimator(line, tmp_path, RunConfig(**{argument: build()}))
    assert argument in str(caught.value) and "GPU:" in str(caught.value) and "CPU:0, CPU:1" in str(caught.value)
    Estimator(line, tmp_path, RunConfig(**{argument: tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])}))
