"""The command line as Python functions: `runner.run` starts a run, `runner.load` opens an earlier one.

Both work like `python -m runner`: they use the same config, processes and record. The calling notebook or script need
not import TensorFlow.
"""

from __future__ import annotations

import atexit
import base64
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.errors import HydraException

from runner.checkpoint import retention
from runner.checkpoint_files import layout
from runner.config import parsing, saved_config, user_code
from runner.config.hydra_mistakes import mistake_in
from runner.config.schema import Config
from runner.launch.app import MISTAKES, command_of
from runner.launch.start_files import read_overrides
from runner.launch.task_starter import TaskStarter
from runner.remote.mirror import local_folder, remote_dir
from runner.system.console import format_number
from runner.system.exit_codes import FAILED, FINISHED, INTERRUPTED, USER_ERROR
from runner.system.redaction import mask_text, secrets_of_overrides
from runner.system.start_status import START_STATUS, is_for
from runner.tracking.curves import CURVES_FILE, read_metrics
from runner.tracking.run_end import how_run_ended
from runner.tracking.summary import read_summary

_STARTER = TaskStarter(renews=True)
"""Starts the tasks of all runs of this process, so that TensorFlow is imported once. Its server, which the first run
starts, ends with this process, whatever ends it."""
atexit.register(_STARTER.close)
os.register_at_fork(after_in_child=_STARTER.forget)


class RunError(RuntimeError):
    """A run that could not start, or that failed.

    Attributes:
      code: exit code of the run: 1: it failed; 2: a mistake in the config or the user's code.
      model_dir: folder of the run; None: the run had no folder yet.
    """

    def __init__(self, message: str, code: int, model_dir: Path | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.model_dir = model_dir


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run.

    Attributes:
      step: the global step at which it was saved.
      path: its path, as `eval.checkpoint`, `export.checkpoint` and `tf.train.load_checkpoint` take it.
      metrics: metric name (`eval/accuracy`) -> value, from the evaluations of this checkpoint.
    """

    step: int
    path: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A run in its folder, whether or not this process started it. Properties are read from the folder when used."""

    model_dir: Path

    @property
    def config(self) -> Config:
        """The config of the last training.

        Raises:
          ConfigError: the file is damaged.
        """
        return parsing.load(self.model_dir / saved_config.FILE)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`."""
        return how_run_ended(self.model_dir).summary

    @property
    def status(self) -> str:
        """The status: `running`, `finished`, `failed` or `interrupted`."""
        return str(self.summary.get("status"))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluations: name (`eval/accuracy`) -> value."""
        return dict(self.summary.get("metrics") or {})

    def curve(self, *names: str) -> Any:
        """Return what the run has recorded of metrics so far, of each step the last value.

        Args:
          names: names of metrics (`train/loss`, `eval/accuracy`); none: all.

        Returns:
          A pandas.DataFrame with a column for each metric and the global step as index; NaN where a step has no value.
          Without pandas: name -> (steps, values), int64 and float64 arrays.

        Raises:
          KeyError: the run has not recorded a metric of this name; the message has those that it has.
        """
        found = read_metrics(self.model_dir)
        for name in names:
            if name not in found:
                raise KeyError(f"{name!r} is no metric of {self.model_dir}. It has {', '.join(sorted(found))}.")
        chosen = {name: found[name] for name in names or sorted(found)}
        if find_spec("pandas") is None:
            import numpy as np

            curves = {}
            for name, points in chosen.items():
                table = np.array(list(points), float).reshape(-1, 2)  # also of a curve without a point
                steps = table[:, 0].astype(np.int64)
                values = table[:, 1]
                curves[name] = (steps, values)
            return curves
        import pandas as pd

        columns = {}
        for name, points in chosen.items():
            columns[name] = pd.Series(dict(points), dtype=float)
        return pd.DataFrame(columns).sort_index().rename_axis("step")

    def _repr_html_(self) -> str:
        """Return how a notebook shows the run: its end or how far it is, its metrics, and its curves."""
        summary = self.summary
        facts = {"status": self.status, "global_step": summary.get("global_step"), "error": summary.get("error")}
        for name, metric in self.metrics.items():
            facts[name] = format_number(float(metric))
        facts["model_dir"] = str(self.model_dir)
        rows = []
        for name, fact in facts.items():
            if fact:
                rows.append(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>")
        picture = self.model_dir / CURVES_FILE
        shown = ""
        if picture.is_file():
            data = base64.b64encode(picture.read_bytes()).decode()
            shown = f'<img alt="learning curves" style="max-width: 100%" src="data:image/png;base64,{data}">'
        return f"<table>{''.join(rows)}</table>{shown}"

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The run's checkpoints, oldest first."""
        found = []
        for name in layout.list_names(self.model_dir):
            path = str(self.model_dir / name)
            step = layout.step_of(path)
            if step is not None:
                found.append(SavedCheckpoint(step, path, retention.metrics_of(path)))
        return found

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model_fn that the config names. Importing it usually imports TensorFlow."""
        return _load_function("model.fn", self.config.model.fn, "model_fn")

    @property
    def input_fns(self) -> dict[str, Callable[..., Any]]:
        """The input_fns that the config names: `train`, `eval` (`eval.<name>` if there are several) and `predict`.

        Importing them usually imports TensorFlow.
        """
        config = self.config.input
        names = {"train": config.train.fn}
        for evaluation, block in config.evals.items():
            key = f"eval.{evaluation}" if evaluation else "eval"
            names[key] = block.fn
        names["predict"] = config.predict.fn
        functions = {}
        for key, name in names.items():
            if name:
                functions[key] = _load_function(f"input.{key}.fn", name, "input_fn")
        return functions

    def train(self, *overrides: str) -> Run:
        """Resume the run and return it.

        Args:
          overrides: changes to the config, in addition to those of the run's last start:
            `train("train.max_steps=2000")`.

        Raises:
          RunError: the run failed.
        """
        where = remote_dir(self.model_dir) or self.model_dir
        return run(*read_overrides(self.model_dir), f"model_dir={where}", *overrides)

    def evaluate(self, *overrides: str) -> dict[str, float]:
        """Evaluate the run's newest checkpoint, and return metric name -> value.

        Args:
          overrides: changes to the config, such as `eval.checkpoint=best`. To evaluate on other data:
            `eval.name=test` and `input.eval.params.path=test.npz`.

        Raises:
          RunError: the evaluation failed.
        """
        return dict(self._run_command("evaluate", overrides)["metrics"])

    def predict(self, *overrides: str) -> Iterator[Any]:
        """Predict with the run's newest checkpoint, and yield the predictions example by example.

        Args:
          overrides: changes to the config, such as `predict.checkpoint=best`.

        Yields:
          One entry of the file of predictions: values as in JSON; texts from a .csv file; arrays from an .npz or
          .tfrecord file; lists from a .parquet file.

        Raises:
          RunError: the prediction failed.
        """
        path = self._run_command("predict", overrides)["predictions"]
        return _read_predictions(Path(path))

    def export(self, *overrides: str) -> list[Path]:
        """Export the run's newest checkpoint as a SavedModel, and return the folders of the exports."""
        return [Path(path) for path in self._run_command("export", overrides)["exports"]]

    def _run_command(self, name: str, overrides: Sequence[str]) -> dict[str, Any]:
        """Run a command that reads the run, and return its summary."""
        where = remote_dir(self.model_dir) or self.model_dir
        run(f"command={name}", f"model_dir={where}", *overrides)
        return read_summary(self.model_dir / f"summary.{name}.json")


def run(
    *overrides: str,
    model_fn: Callable[..., Any] | None = None,
    input_fns: Mapping[str, Callable[..., Any]] | None = None,
) -> Run:
    """Run the command line `python -m runner <overrides>`, and return the run when it has ended.

    Ctrl-C, or a notebook's interrupt button, saves a checkpoint and ends the run with the status interrupted. The same
    call resumes it if `model_dir` is given.

    Args:
      overrides: as on the command line: `"experiment=mine", "train.max_steps=500"`.
      model_fn: the function itself instead of its name in `model.fn`. A function of a module works in any run, one of
        a notebook's cell or a script only with `run.inline=true`, which computes the run in this process.
      input_fns: the same for `input.<name>.fn`: functions by name, as `Run.input_fns` has them: `train`, `eval`,
        `predict`.

    Raises:
      RunError: the run failed, or its config is wrong; the message says why.
      ValueError: an override is a flag; sweeps and `--help` need the command line.
    """
    flags = [text for text in overrides if text.startswith("-")]
    if flags:
        raise ValueError(
            f"{flags[0]}: runner.run takes overrides, not flags. Use the command line: python -m runner {flags[0]} ..."
        )
    overrides = (*overrides, *_named_functions(model_fn, input_fns or {}))
    user_code.add_to_path(Path.cwd())
    if is_for(overrides):
        START_STATUS.show("reading the config")
    try:
        with command_of(overrides, _STARTER) as line:
            code = line.run()
    except (HydraException, *MISTAKES) as error:
        mistake = str(mistake_in(error, overrides))
        raise RunError(mask_text(mistake, secrets_of_overrides(overrides)), USER_ERROR) from error
    finally:
        START_STATUS.stop()
    if code in (FAILED, USER_ERROR):
        raise RunError(line.command.mistake, code, line.model_dir)
    assert code in (FINISHED, INTERRUPTED), code
    return Run(line.model_dir or Path.cwd())


def load(model_dir: str | os.PathLike[str]) -> Run:
    """Return the run in the folder `model_dir`, or at a URL of an object store, whose files are fetched.

    Raises:
      ConfigError: the URL is none of an object store, or cannot be reached.
      FileNotFoundError: the folder contains no run.
    """
    folder = Path(local_folder("model_dir=", os.fspath(model_dir), is_read=True)).absolute()
    if not (folder / saved_config.FILE).exists():
        known = sorted(str(path.parent) for path in Path("outputs").glob(f"*/{saved_config.FILE}"))
        hint = ""
        if known:  # their names begin with the time
            hint = f" The newest in outputs: {', '.join(known[-3:])}."
        raise FileNotFoundError(
            f"runner.load({str(model_dir)!r}): there is no run in this folder ({saved_config.FILE} is missing).{hint}"
        )
    return Run(folder)


def _named_functions(model_fn: Callable[..., Any] | None, input_fns: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return the overrides that name the functions.

    Raises:
      RunError: a function cannot be found by its name.
    """
    given = {}
    if model_fn is not None:
        given["model.fn"] = model_fn
    for name, function in input_fns.items():
        given[f"input.{name}.fn"] = function
    overrides = []
    for key, function in given.items():
        module = getattr(function, "__module__", None)
        qualified_name = getattr(function, "__qualname__", "")
        found: Any = sys.modules.get(str(module))
        for part in qualified_name.split("."):
            found = getattr(found, part, None)
        if found is not function:
            raise RunError(
                f"{key}: {function!r} is not found by a name in its module. Define it with def, outside of functions "
                "and classes.",
                USER_ERROR,
            )
        overrides.append(f"{key}={module}.{qualified_name}")
    return overrides


def _load_function(key: str, name: str | None, default: str) -> Callable[..., Any]:
    user_code.add_to_path(Path.cwd())
    return user_code.load(key, str(name), default)


def _read_predictions(path: Path) -> Iterator[Any]:
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path) as arrays:
            columns = {name: arrays[name] for name in arrays.files}
        for row in zip(*columns.values(), strict=True):
            yield dict(zip(columns, row, strict=True))
    elif path.suffix == ".parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    elif path.suffix == ".tfrecord":
        yield from _read_examples(path)
    elif path.suffix == ".csv":
        with open(path, encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    else:
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def _read_examples(path: Path) -> Iterator[dict[str, Any]]:
    import numpy as np
    import tensorflow as tf

    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        features = tf.train.Example.FromString(record).features.feature
        arrays = {}
        for name, feature in features.items():
            values = getattr(feature, feature.WhichOneof("kind"))  # bytes_list, float_list or int64_list
            arrays[name] = np.array(values.value)
        yield arrays
