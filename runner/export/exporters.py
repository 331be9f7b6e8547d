"""Exporters: decide when to write a SavedModel during training. Each writes to a folder of its own.

An exporter records the checkpoint and metrics of each export, so a restarted run knows the best value so far, and does
not export a checkpoint twice. The record is among the runner's own files in model_dir: programs take whatever is in the
exporter's folder for an export.
"""

from __future__ import annotations

import abc
import inspect
import math
import operator
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import tensorflow as tf

from runner.export.saved_model import exports_in
from runner.system.files import new_runner_file, read_json, write_json
from runner.tracking import tensorboard

CompareFn = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""A function (best result so far, current result) -> whether the current one is better. A result is metric name ->
value."""


class Exporter(abc.ABC):
    """Base class of exporters, which export models during training. `EvalSpec(exporters=)` takes one or several."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the exporter, and of the folder of its exports."""

    @abc.abstractmethod
    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Any:  # fmt: skip
        """Export a checkpoint if this exporter wants it. Called after each evaluation, in the process that evaluates.

        Args:
          estimator: the Estimator that trains.
          export_path: the exporter's folder, `<model_dir>/export/<name>`.
          checkpoint_path: path of the evaluated checkpoint.
          eval_result: metric name -> value for this checkpoint.
          is_the_final_export: training has ended, for whatever reason. The last checkpoint may be passed twice: without
            and with this flag.

        Returns:
          The path of the export; None if nothing was written.
        """


def checked_exporters(what: str, given: Any) -> tuple[Exporter, ...]:
    """Return the exporters as a tuple, and check them.

    Args:
      what: the setting that has them, for messages.
      given: an exporter, several, or None.

    Raises:
      ValueError: an object is not an Exporter, a name cannot be that of a folder, or two have the same name.
    """
    exporters = (given,) if isinstance(given, Exporter) else tuple(given or ())
    for exporter in exporters:
        if not isinstance(exporter, Exporter):
            raise ValueError(
                f"{what}: {exporter!r} is not an Exporter. Use LatestExporter, FinalExporter, BestExporter or a "
                "subclass of runner.Exporter."
            )
        name = exporter.name
        if not name or not isinstance(name, str) or os.sep in name:
            raise ValueError(f"{what}: exporter name {name!r}: it must be the name of a folder, without {os.sep!r}.")
    names = [exporter.name for exporter in exporters]
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: two exporters have the same name: {names}. Each needs its own, for its folder.")
    return exporters


class LatestExporter(Exporter):
    """Exports every evaluated checkpoint, and keeps the newest exports.

    Args:
      name: name of the exporter and of its folder.
      serving_input_receiver_fn: returns the `ServingInputReceiver` of the exported model.
      assets_extra: as in `Estimator.export_saved_model`.
      as_text: as in `Estimator.export_saved_model`.
      exports_to_keep: number of newest exports to keep; None: all.

    Raises:
      ValueError: exports_to_keep is not positive.
    """

    name = ""

    def __init__(
        self, name: str, serving_input_receiver_fn: Callable[[], Any], assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False, exports_to_keep: int | None = 5,
    ) -> None:  # fmt: skip
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(f"exports_to_keep={exports_to_keep} must be positive; use None to keep all exports.")
        self.name = name
        self._keep = exports_to_keep
        self._receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        # Folder of exports -> the metrics of the last export of this process.
        self._last_metrics: dict[str, Mapping[str, Any]] = {}

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Any:  # fmt: skip
        export_path = os.fsdecode(export_path)
        record: _Record | None = None
        last: Mapping[str, Any] | None = None
        is_known = False
        # Tests and libraries may pass a stand-in for an estimator, and a checkpoint that is not there. Such an export
        # is not recorded.
        if os.path.exists(f"{checkpoint_path}.index"):
            record = _Record.read(self.name, export_path, checkpoint_path)
            last = record.last
            is_known = record.has(checkpoint_path, eval_result)
        # What this process exported counts first: exports without a checkpoint are not in the record.
        last = self._last_metrics.get(export_path, last)
        if is_known or not self._is_due(last, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path, self._receiver_fn,
            assets_extra=self._assets_extra, as_text=self._as_text, checkpoint_path=checkpoint_path,
        )  # fmt: skip
        self._last_metrics[export_path] = eval_result
        if record is not None:
            record.add(os.fsdecode(path), checkpoint_path, eval_result)
        if self._keep is not None:
            for old in exports_in(export_path)[: -self._keep]:
                tf.io.gfile.rmtree(old)
        return path

    def _is_due(self, last: Mapping[str, Any] | None, found: Mapping[str, Any], is_the_final_export: bool) -> bool:
        """Report whether to export a checkpoint with the metrics `found`. `last`: those of the last export, if any."""
        return True


class FinalExporter(LatestExporter):
    """Exports the last checkpoint of training, and keeps all exports by default.

    The arguments are those of `LatestExporter`.
    """

    def __init__(
        self, name: str, serving_input_receiver_fn: Callable[[], Any], assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False, exports_to_keep: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)

    def _is_due(self, last: Mapping[str, Any] | None, found: Mapping[str, Any], is_the_final_export: bool) -> bool:
        return is_the_final_export


class BestExporter(LatestExporter):
    """Exports a checkpoint if it is better than all earlier ones, including those before a restart.

    Args:
      name: name of the exporter and of its folder.
      serving_input_receiver_fn: returns the `ServingInputReceiver` of the exported model. Required.
      event_file_pattern: ignored. tf.estimator read the best value from the event files; here a file in the
        model_dir has it.
      compare_fn: a function (best result so far, current result) -> whether the current one is better. Arguments with
        the names best_eval_result and current_eval_result are passed by name. By default the smaller `loss` is better.
      assets_extra: as in `Estimator.export_saved_model`.
      as_text: as in `Estimator.export_saved_model`.
      exports_to_keep: number of newest exports to keep, which are the best ones; None: all.

    Raises:
      ValueError: there is no receiver function, exports_to_keep is not positive, or compare_fn does not take two
        results.
    """

    def __init__(
        self, name: str = "best_exporter", serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = None,
        compare_fn: CompareFn = lambda best, found: better("loss", "min")(best, found),
        assets_extra: Mapping[str, str] | None = None, as_text: bool = False, exports_to_keep: int | None = 5,
    ) -> None:  # fmt: skip
        if serving_input_receiver_fn is None:
            raise ValueError(
                "BestExporter(serving_input_receiver_fn=None): give a function that returns a ServingInputReceiver."
            )
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        self._is_better = _checked_compare_fn(compare_fn)

    def _is_due(self, last: Mapping[str, Any] | None, found: Mapping[str, Any], is_the_final_export: bool) -> bool:
        return last is None or bool(self._is_better(last, found))  # the last export is the best


def _checked_compare_fn(compare_fn: Callable[..., bool]) -> CompareFn:
    """Return a function (best result, current result) that calls `compare_fn`, by name if it has the argument names
    of tf.estimator.

    Raises:
      ValueError: `compare_fn` cannot be called with two results.
      TypeError: it is no function.
    """
    names = ("best_eval_result", "current_eval_result")
    try:
        signature = inspect.signature(compare_fn)
        if set(names) <= set(signature.parameters):
            signature.bind(**dict.fromkeys(names))
            return lambda best, found: compare_fn(best_eval_result=best, current_eval_result=found)
        signature.bind(None, None)
    except TypeError:
        kind = ValueError if compare_fn is None or callable(compare_fn) else TypeError
        raise kind(
            f"BestExporter(compare_fn={compare_fn!r}): the function must take two arguments, {' and '.join(names)}."
        ) from None
    return compare_fn


def better(metric: str, mode: str) -> CompareFn:
    """Return a function (best result, current result) -> whether the current result is better by `metric`.

    NaN is worse than any number.

    Args:
      metric: name of the metric.
      mode: "min" if smaller values are better, "max" if larger values are.
    """
    compare = operator.lt if mode == "min" else operator.gt

    def is_better(best: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
        before = _value(best, metric)
        now = _value(found, metric)
        replaces_nan = math.isnan(before) and not math.isnan(now)
        return replaces_nan or compare(now, before)

    return is_better


def _value(result: Mapping[str, Any], metric: str) -> float:
    if metric not in result:
        raise ValueError(f"BestExporter: the evaluation has no metric {metric!r}. There are: {', '.join(result)}.")
    return float(result[metric])


class _Record:
    """The checkpoint and metrics of each export in a folder, stored in `exports.<exporter>.json` with the checkpoint's
    own files.

    Args:
      file: the file.
      exports: name of an export's folder -> its checkpoint and metrics, as `_facts` returns them.
    """

    def __init__(self, file: Path, exports: dict[str, dict[str, Any]]) -> None:
        self._file = file
        self._exports = exports

    @classmethod
    def read(cls, exporter: str, export_path: str, checkpoint_path: str) -> Self:
        """Return the record of an exporter; an empty one if there is no file.

        A file that an earlier version of the runner wrote, in the folder of the exports, is moved to the new place.

        Args:
          exporter: name of the exporter.
          export_path: folder of its exports.
          checkpoint_path: path of a checkpoint, which has the file beside it.
        """
        file = new_runner_file(Path(checkpoint_path).parent / f"exports.{exporter}.json")
        file_of_earlier_versions = Path(export_path) / "exports.json"
        if file_of_earlier_versions.exists():
            shutil.move(file_of_earlier_versions, file)
        recorded = (read_json(file) or {}).get("exports", {})
        # Deleted exports are forgotten, so that their checkpoints may be exported again, and so that `last` is an
        # export that is there.
        names = {os.path.basename(path) for path in exports_in(export_path)}
        exports: dict[str, dict[str, Any]] = {}
        for name, facts in recorded.items():
            if name in names:
                exports[name] = facts
        return cls(file, exports)

    @property
    def last(self) -> dict[str, float] | None:
        """The metrics of the newest export; None if there is no export."""
        if not self._exports:
            return None
        newest = max(self._exports, key=int)  # a name is the time of the export in seconds
        metrics = self._exports[newest]["metrics"]
        return {name: float(value) for name, value in metrics.items()}

    def has(self, checkpoint_path: str, eval_result: Mapping[str, Any]) -> bool:
        """Report whether a checkpoint of the same name with the same results was exported."""
        return _facts(checkpoint_path, eval_result) in self._exports.values()

    def add(self, path: str, checkpoint_path: str, eval_result: Mapping[str, Any]) -> None:
        """Add the export in the folder `path`, and write the file."""
        self._exports[os.path.basename(path)] = _facts(checkpoint_path, eval_result)
        write_json(self._file, {"exports": self._exports})


def _facts(checkpoint_path: str, eval_result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is recorded of an export: the name of the checkpoint, and metric name -> value as text."""
    # Numbers are text, which float() reads, because JSON has no NaN.
    metrics = {name: repr(value) for name, value in tensorboard.scalars(eval_result).items()}
    return {"checkpoint": os.path.basename(checkpoint_path), "metrics": metrics}
