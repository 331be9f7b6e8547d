"""What differs on a GPU: `make test-gpu`, two minutes on one card.

The card is split into two logical GPUs. NCCL refuses two replicas on one card, so gradients are added by copies.
`RUNNER_GPU_TESTS_ON=CPU make test-gpu` is a rehearsal on two logical CPUs: it shows that the tests work, and no more.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, RunConfig, build_strategy
from runner.data import inputs
from runner.export.receivers import receiver_fn_of_spec
from tests.support import on_gpu
from tests.support.models import train_input as float64_input
from tests.support.on_gpu import FIRST, KIND, SECOND, eval_input, examples, model_fn, train_input, values_of
from tests.support.sparse_models import native_lazy_adam

ROOT = Path(__file__).parents[2]
SMALL = ["model.params.network=mlp", "train.max_steps=20", "tracking=none"]
ON_GPU = KIND == "GPU"
NUM_CARDS = len(tf.config.list_physical_devices("GPU")) if ON_GPU else 0
ANOTHER_CPU = "CPU:1"
"""Not the CPU that a rehearsal trains on."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and NUM_CARDS < 1, reason="TensorFlow sees no GPU here"),
]
needs_two_cards = pytest.mark.skipif(NUM_CARDS < 2, reason="TensorFlow sees fewer than two GPUs here: NCCL needs two")


@pytest.fixture(scope="module", autouse=True)
def two_devices() -> None:
    """Split the card, before anything uses it, and have it multiply in float32, not in TF32."""
    try:
        on_gpu.split_card()
    except RuntimeError as error:
        pytest.fail(f"TensorFlow is already in use: run this file alone, by `make test-gpu`. {error}")
    tf.config.experimental.enable_tensor_float_32_execution(False)


@functools.cache
def strategy_of(name: str) -> tf.distribute.Strategy | None:
    """Return a strategy over both logical devices, or over one; each name has one object."""
    if name == "default":
        return None
    if name == "cpu":
        return build_strategy("one_device", devices=[ANOTHER_CPU])
    if name == "central_storage":
        return build_strategy(name, devices=[FIRST, SECOND])
    return build_strategy("mirrored", devices=[FIRST, SECOND], cross_device_ops=name)


def trainer_of(folder: Path, strategy: str, params: dict[str, Any] | None = None, **config: Any) -> Estimator:
    run_config = RunConfig(tf_random_seed=5, train_distribute=strategy_of(strategy), **config)
    return Estimator(model_fn, folder, run_config, params or {})


def trained(folder: Path, strategy: str, params: dict[str, Any] | None = None, **config: Any) -> dict[str, np.ndarray]:
    """Return what 12 steps with uneven batches come to."""
    return values_of(trainer_of(folder, strategy, params, **config).train(train_input(), steps=12))


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol / 10, err_msg=name)


def peak_of(device: str) -> int:
    peak: int = tf.config.experimental.get_memory_info(device)["peak"]
    return peak


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What the CPU comes to."""
    return trained(tmp_path_factory.mktemp("on_cpu"), "cpu")


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_default_trains_on_the_first_device(tmp_path: Path) -> None:
    assert inputs.step_devices(None)[0].endswith(FIRST)
    if ON_GPU:
        tf.config.experimental.reset_memory_stats(FIRST)
    before = peak_of(FIRST) if ON_GPU else 0
    trained(tmp_path, "default")
    if ON_GPU:
        assert peak_of(FIRST) > before


def test_the_default_comes_to_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    """With moving averages and a recurrent layer, which cuDNN computes."""
    params = {"batch_norm": True, "recurrent": True}
    assert_close(trained(tmp_path / "found", "default", params), trained(tmp_path / "expected", "cpu", params))


@pytest.mark.parametrize("strategy", ["hierarchical_copy", "reduction_to_one_device", "central_storage"])
def test_two_replicas_with_uneven_batches_come_to_the_numbers_of_one(
    strategy: str, tmp_path: Path, on_cpu: dict[str, np.ndarray]
) -> None:
    over_two = strategy_of(strategy)
    assert over_two is not None and over_two.num_replicas_in_sync == 2
    assert_close(trained(tmp_path, strategy, check_replicas=strategy != "central_storage"), on_cpu)


def test_a_gradient_is_clipped_and_accumulated_as_on_the_cpu(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clip_global_norm": 0.3, "gradient_accumulation": 3, "ema_decay": 0.9}
    expected = trained(tmp_path / "expected", "cpu", **settings)
    for strategy in ("default", "reduction_to_one_device"):
        assert_close(trained(tmp_path / strategy, strategy, **settings), expected)


@pytest.mark.parametrize("strategy", ["default", "reduction_to_one_device", "central_storage"])
def test_sparse_gradients_come_to_the_numbers_of_the_cpu(strategy: str, tmp_path: Path) -> None:
    """Only the rows that were looked up are updated."""

    def of(name: str) -> dict[str, np.ndarray]:
        config = RunConfig(tf_random_seed=5, train_distribute=strategy_of(name))
        trainer = Estimator(native_lazy_adam, tmp_path / name, config)
        return values_of(trainer.train(float64_input(6, 19, "float64"), steps=12))

    assert_close(of(strategy), of("cpu"))


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("jit", [False, True])
def test_layers_compute_in_half_and_variables_are_in_float32(precision: str, jit: bool, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "default", precision=precision, jit=jit)
    before = trainer.train(train_input(), steps=1).evaluate(eval_input())["loss"]
    after = trainer.train(train_input(), steps=40).evaluate(eval_input())["loss"]
    (first, *_) = trainer.predict(eval_input())
    assert tf.as_dtype(int(first["dtype"])).name == precision.removeprefix("mixed_")
    assert after < 0.7 * before
    values = values_of(trainer)
    assert {value.dtype.name for value in values.values() if value.dtype.kind == "f"} == {"float32"}
    assert ("loss_scale/dynamic_scale" in values) == (precision == "mixed_float16")


@pytest.mark.parametrize("strategy", ["default", "hierarchical_copy"])
def test_what_xla_compiles_comes_to_the_numbers_of_the_cpu(
    strategy: str, tmp_path: Path, on_cpu: dict[str, np.ndarray]
) -> None:
    assert_close(trained(tmp_path, strategy, jit=True), on_cpu)


# --- input, checkpoints, evaluation, export ---------------------------------------------------------------------------


def test_batches_that_are_copied_ahead_are_the_same(
    tmp_path: Path, on_cpu: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ON_GPU:  # TensorFlow copies to a CPU in the same way
        monkeypatch.setattr(inputs, "_choose_prefetch", lambda *_: inputs.DevicePrefetch("/device:CPU:0", 2))
    trainer = trainer_of(tmp_path, "default").train(train_input(ahead=2), steps=12)
    assert_close(values_of(trainer), on_cpu)


def test_a_checkpoint_goes_from_a_gpu_to_a_cpu_and_back(tmp_path: Path, on_cpu: dict[str, np.ndarray]) -> None:
    for strategy in ("default", "cpu", "hierarchical_copy", "central_storage"):
        trainer = trainer_of(tmp_path, strategy).train(train_input(), steps=3)
    assert_close(values_of(trainer), on_cpu)


def test_evaluation_and_prediction_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Each example is counted once, and a metric has the value that it has over one replica."""
    of_cpu = trainer_of(tmp_path, "cpu").train(train_input(), steps=4)
    metrics = of_cpu.evaluate(eval_input())
    predictions = [one["y"] for one in of_cpu.predict(eval_input())]
    assert len(predictions) == 22
    for strategy in ("default", "reduction_to_one_device", "central_storage"):
        other = trainer_of(tmp_path, strategy)
        assert other.evaluate(eval_input()) == pytest.approx(metrics, rel=1e-5)
        found = [one["y"] for one in other.predict(eval_input())]
        np.testing.assert_allclose(found, predictions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["default", "hierarchical_copy"])
def test_an_export_computes_on_either_device(strategy: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", strategy).train(train_input(), steps=4)
    expected = [one["y"] for one in trainer.predict(eval_input())]
    spec = {"image": tf.TensorSpec([None, 8, 8, 3]), "ids": tf.TensorSpec([None, 5], tf.int64)}
    path = trainer.export_saved_model(tmp_path / "export", receiver_fn_of_spec(spec)).decode()
    features, _ = examples(22)
    for device in (FIRST, ANOTHER_CPU):
        with tf.device(device):
            served = tf.saved_model.load(path).signatures["serving_default"]
            found = served(**{name: tf.constant(value) for name, value in features.items()})
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_and_num_gpus_choose_and_what_is_not_there_is_refused() -> None:
    number = len(tf.config.list_logical_devices("GPU"))
    of_second = build_strategy("one_device", devices=[SECOND])
    assert of_second is not None and of_second.extended.worker_devices[0].endswith(SECOND)
    if ON_GPU:
        of_one = build_strategy("mirrored", num_gpus=1)
        assert of_one is not None and of_one.num_replicas_in_sync == 1
    with pytest.raises(ValueError, match=f"num_gpus={number + 1}, but TensorFlow sees {number} GPUs"):
        build_strategy("mirrored", num_gpus=number + 1)
    with pytest.raises(ValueError, match=f"there is no device '{KIND}:97'"):
        build_strategy("one_device", devices=[f"{KIND}:97"])


def run_python(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, code: int = 0) -> str:
    """Run a Python, whose devices are its own, in `folder`; return its stdout. It ends with the exit code `code`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NVIDIA_TF32_OVERRIDE": "0"} | dict(environment or {})
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == code, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


def train(folder: Path, *overrides: str, **environment: str) -> dict[str, Any]:
    """Return the summary of a run of the shipped digits."""
    run_python(folder.parent, "-m", "runner", *SMALL, f"model_dir={folder}", *overrides, environment=environment)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


GROWTH = """
import json
import tensorflow as tf
from runner import Hook

class Growth(Hook):
    def begin(self, run):
        gpus = tf.config.list_physical_devices("GPU")
        with open("growth.json", "w") as file:
            json.dump([tf.config.experimental.get_memory_growth(gpu) for gpu in gpus], file)
"""


@pytest.fixture(scope="module")
def of_command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of a run of the command, whose memory grows."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "growth.py").write_text(GROWTH)
    return folder, train(folder / "run", "run.memory_growth=true", "train.hooks=[{fn: growth.Growth}]")


def test_memory_growth_of_the_config_holds_and_the_device_is_named(of_command: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = of_command
    assert summary["global_step"] == 20
    assert json.loads((folder / "growth.json").read_text()) == [True] * NUM_CARDS
    if ON_GPU:
        details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
        assert summary["devices"] == f"1 x {details['device_name']}"
    else:
        assert summary["devices"].startswith("CPU")


GROWS = """
import tensorflow as tf
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
import runner
from tests.support.line import native_line, points
runner.Estimator(native_line, "model").train(points(repeat=True), steps=20)
assert all(tf.config.experimental.get_memory_growth(gpu) for gpu in gpus)
print(tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpus else 1)
"""


def test_memory_growth_that_a_script_asks_for_holds_in_training(tmp_path: Path) -> None:
    """TensorFlow refuses it once devices are in use: importing the runner must not use them."""
    assert 0 < int(run_python(tmp_path, "-c", GROWS).splitlines()[-1]) < 2**28


def test_cuda_visible_devices_hides_the_card(tmp_path: Path, of_command: tuple[Path, dict[str, Any]]) -> None:
    hidden = train(tmp_path / "run", CUDA_VISIBLE_DEVICES="-1")
    assert hidden["devices"].startswith("CPU")
    _, shown = of_command
    assert hidden["metrics"]["eval/loss"] == pytest.approx(shown["metrics"]["eval/loss"], rel=1e-3)  # Adam, float32


def test_two_workers_that_share_the_card_come_to_the_numbers_of_one(
    tmp_path: Path, of_command: tuple[Path, dict[str, Any]]
) -> None:
    """By gRPC, since NCCL refuses two processes on one card; each leaves the other some memory."""
    overrides = ["strategy=multi_worker", "cluster.num_workers=2", "strategy.communication=ring"]
    two = train(tmp_path / "run", *overrides, "run.memory_growth=true")
    _, one = of_command
    assert two["global_step"] == 20
    assert two["metrics"]["eval/loss"] == pytest.approx(one["metrics"]["eval/loss"], rel=1e-3)  # Adam, float32


@needs_two_cards
def test_two_cards_come_to_the_numbers_of_one(tmp_path: Path, of_command: tuple[Path, dict[str, Any]]) -> None:
    """By NCCL, TensorFlow's default."""
    two = train(tmp_path / "two", "strategy=mirrored", "strategy.devices=[GPU:0,GPU:1]", "run.memory_growth=true")
    _, one = of_command
    assert two["metrics"]["eval/loss"] == pytest.approx(one["metrics"]["eval/loss"], rel=1e-3)  # Adam, float32


def test_a_deterministic_run_that_was_killed_comes_to_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Convolutions and sums of looked up rows add in no fixed order on a GPU, unless they are told to."""
    life = ("-m", "tests.support.on_gpu")
    run_python(tmp_path, *life, "undisturbed")
    run_python(tmp_path, *life, "killed", "--killed", code=-signal.SIGKILL)
    run_python(tmp_path, *life, "killed")
    undisturbed, killed = (values_of(Estimator(model_fn, tmp_path / name)) for name in ("undisturbed", "killed"))
    assert undisturbed["global_step"] == on_gpu.MAX_STEPS
    assert list(killed) == list(undisturbed)
    for name, value in undisturbed.items():
        assert value.tobytes() == killed[name].tobytes(), name


def test_the_doctor_names_the_card(tmp_path: Path) -> None:
    said = run_python(tmp_path, "-m", "runner", "command=doctor")
    assert FIRST in said
    assert "does not compute" not in said
    assert ("compute capability" in said) == ON_GPU
