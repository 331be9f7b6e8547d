"""What a person reads of a mistake in their own code: one message, the lines of their code, once, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import EstimatorSpec
from tests.support.jobs import config_file, endless, noted, once, run
from tests.support.line import line
from tests.support.messages import Messages
from tests.support.tiers import slow_but

HERE = "tests.task.test_error_report"


def helper(features: Any) -> Any:
    return tf.matmul(tf.ones([2, 4]), tf.ones([3, 1]))


def of_wrong_shape(features: Any, labels: Any, mode: str, params: Any) -> Any:
    helper(features)
    return line(features, labels, mode, params)


def out_of_range(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = line(features, labels, mode, params)
    looked_up = tf.gather(tf.ones([2]), tf.cast(features, tf.int32))
    return spec._replace(loss=spec.loss + 0 * tf.reduce_mean(looked_up))


def not_a_number(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    spec = line(features, labels, mode, params)
    return spec._replace(loss=spec.loss * float("nan"))


def unreachable(features: Any, labels: Any, mode: str, params: Any) -> Any:
    raise RuntimeError("no such service")


def too_large(features: Any, labels: Any, mode: str, params: Any) -> Any:
    np.empty(2**62, np.uint8)


def imports_without_memory(features: Any, labels: Any, mode: str, params: Any) -> Any:
    raise ImportError("libfast.so: failed to map segment from shared object")


def wraps_too_large(features: Any, labels: Any, mode: str, params: Any) -> Any:
    try:
        return too_large(features, labels, mode, params)
    except MemoryError as error:
        raise ValueError("cannot prepare the table") from error


def no_bucket(params: Any) -> Any:
    raise ConnectionError("no such bucket")


def not_traced(params: Any) -> Any:
    def parse(x: Any, y: Any) -> Any:
        return x.nothing, y

    return endless(params).map(parse)


def bad_row(params: Any) -> Any:
    def rows() -> Any:
        for row in range(4):
            if row == 3:
                raise RuntimeError("row 3 is bad")
            yield np.float32(row), np.float32(row)

    scalar = tf.TensorSpec([], tf.float32)
    return tf.data.Dataset.from_generator(rows, output_signature=(scalar, scalar)).batch(2)


def bad_index(params: Any) -> Any:
    return once(params).map(lambda x, y: (tf.gather(tf.ones([3]), tf.cast(x, tf.int32)), y))


def wrongly_compiled(features: Any, labels: Any, mode: str, params: Any) -> Any:
    model = keras.Sequential([keras.layers.Reshape([1]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), "mse", ["mae"])  # the third argument is loss_weights
    return model


def with_breakpoint(features: Any, labels: Any, mode: str, params: Any) -> Any:
    breakpoint()
    return line(features, labels, mode, params)


def said_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines from the message on."""
    lines = capsys.readouterr().err.splitlines()
    return lines[next(index for index, text in enumerate(lines) if text.startswith("runner: ")) :]


def test_a_mistake_in_model_fn_is_one_message_with_the_lines_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.of_wrong_shape") == 2
    said = said_of(capsys)
    for text in said:
        messages.same("exit 2", text)
    assert "Dimensions" in said[0]


def test_a_mistake_in_what_model_fn_returned_names_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.wrongly_compiled") == 2
    message, frame, _ = said_of(capsys)
    assert message.startswith("runner: ValueError: ")  # in words of Keras, which name neither file nor line
    assert frame.startswith(f"  in {__file__}, line ") and ", in wrongly_compiled: def wrongly_compiled(" in frame


def test_hydra_full_error_shows_our_lines_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run(tmp_path, f"model.fn={HERE}.of_wrong_shape") == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and "runner/model_fn.py" in said and "HYDRA_FULL_ERROR" not in said


def test_an_operation_that_fails_names_the_line_that_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.out_of_range") == 1
    said = said_of(capsys)
    for text in said:
        messages.same("exit 1", text)
    assert "indices[" in said[0] and said[0].endswith("[0, 2)")
    (error,) = [event for event in noted(tmp_path) if event.get("event") == "error"]
    assert "Traceback" in error["traceback"], "the journal keeps all of it"


def test_a_loss_that_is_not_finite_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.not_a_number") == 1
    (message,) = said_of(capsys)
    messages.same("exit 1", message)


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [
        (f"model.fn={HERE}.unreachable", ""),
        (f"input.train.fn={HERE}.no_bucket", ""),
        (f"input.train.fn={HERE}.not_traced", "'nothing'"),
        (f"input.train.fn={HERE}.bad_row", ""),
        (f"input.train.fn={HERE}.bad_index", "indices[0]"),
        (f"input.eval.fn={HERE}.bad_index", "indices[2]"),
    ],
)
def test_errors_of_the_users_functions_exit_with_2(
    settings: str, quoted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    """`quoted`: what the message quotes of TensorFlow's own."""
    assert run(tmp_path, settings) == 2
    said = said_of(capsys)
    for text in said:
        messages.same("exit 2", text)
    assert quoted in said[0]
    text = "\n".join(said)
    assert "Traceback" not in text and "runner/data" not in text and "autograph" not in text


@pytest.mark.parametrize("function", ["too_large", "imports_without_memory", "wraps_too_large"])
def test_too_little_memory_is_no_mistake_of_the_user(
    function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, f"model.fn={HERE}.{function}") == 1
    text = "\n".join(said_of(capsys))
    assert "Traceback" not in text and "no more memory" in text and f"in {function}" in text


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("way", slow_but(["breakpoint()", "pdb"], "breakpoint()"))
def test_a_breakpoint_without_a_terminal_says_what_to_set(way: str, tmp_path: Path, messages: Messages) -> None:
    file = config_file(tmp_path, f"model.fn={HERE}.with_breakpoint")
    env = {**os.environ, **({"PYTHONBREAKPOINT": "pdb.set_trace"} if way == "pdb" else {})}
    task = subprocess.run(
        [sys.executable, "-m", "runner.task", str(file)], cwd=Path(__file__).parents[2], env=env, check=False,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert task.returncode == 2
    (message,) = [text for text in task.stderr.splitlines() if text.startswith("runner: ")]
    messages.same("exit 2", message)
    (frame,) = [text for text in task.stderr.splitlines() if ", in with_breakpoint: " in text]
    messages.same("line", frame)
    assert "Traceback" not in task.stderr and ("(Pdb)" in task.stdout) == (way == "pdb")
