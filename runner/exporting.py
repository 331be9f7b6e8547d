"""What an Estimator exports, under the names that tf.estimator had for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runner import export, manifest
from runner.inputs import build_feed
from runner.model_fn import ModeKeys
from runner.precision import with_precision
from runner.receivers import ServingInputReceiver, SupervisedInputReceiver
from runner.report import relative
from runner.seeds import seeded
from runner.stored_model import StoredModel


class Exporting(StoredModel):
    """The methods of an Estimator that write SavedModels. They need no strategy: the process that calls them writes."""

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver | SupervisedInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """Writes a SavedModel with a signature for each of `export_outputs`.

        It holds what these need, and the moving averages of the weights where the run keeps them. Files that fill
        lookup tables are copied into it.

        Args:
          export_dir_base: where its folder is made, named by seconds since 1970.
          serving_input_receiver_fn: returns what receives requests; see `runner.receivers`.
          assets_extra: path below `assets.extra` -> the file that is copied there.
          as_text: saved_model.pbtxt in place of saved_model.pb.
          checkpoint_path: None: the latest.
          experimental_mode: in which model_fn is called.

        Returns: the path of the folder, as bytes, as tf.estimator did.

        Raises:
          ValueError: there is no receiver; no checkpoint, and no warm start; the checkpoint lacks a variable.
        """
        if serving_input_receiver_fn is None:
            raise ValueError("export_saved_model(serving_input_receiver_fn=None): give a function.")
        return self.experimental_export_all_saved_models(
            export_dir_base, {experimental_mode: serving_input_receiver_fn}, assets_extra, as_text, checkpoint_path
        )

    def experimental_export_all_saved_models(
        self,
        export_dir_base: str | os.PathLike[str],
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
    ) -> bytes:
        """As `export_saved_model`, a graph for each mode, tagged `train`, `eval` and `serve`.

        Args:
          input_receiver_fn_map: mode -> function; of TRAIN and EVAL it returns a SupervisedInputReceiver.
        """
        path = os.fspath(checkpoint_path) if checkpoint_path is not None else self.latest_checkpoint()
        if path is None and self._config.warm_start is None:
            raise ValueError(
                f"export_saved_model: there is no checkpoint in {self._config.model_dir}. Train first, or give the "
                "model_dir of a model that was trained."
            )
        source = export.Source(with_precision(self._model_fn, self._config.precision), path, self._config)
        with self._journal.phase("export"):
            written = export.write_saved_model(
                os.fspath(export_dir_base), input_receiver_fn_map, source, assets_extra=assets_extra, as_text=as_text
            )
        step = 0 if path is None else manifest.step_of(Path(path).name)
        where = os.path.abspath(written.path)
        self._journal.event("exported", path=where, checkpoint=path, step=step, tensors=written.tensors)
        shown = "; ".join(f"{name}: {what}" for name, what in written.signatures.items())
        self._progress.message(f"Exported {relative(Path(written.path))} ({shown})")
        return os.fsencode(written.path)

    def features_spec(self, input_fn: Any, mode: str) -> Any:
        """The spec of the features that an input function gives: what requests may look like. It is called for this."""
        with seeded(self._config.seed):
            feed = build_feed(input_fn, mode=mode, params=self._params, config=self._config, num_replicas=1)
        return feed.replica_spec[0]

    def export_savedmodel(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        strip_default_attrs: bool = True,
    ) -> bytes:
        """`export_saved_model` under its name in TF 1. Default attributes are left out in any case."""
        return self.export_saved_model(
            export_dir_base, serving_input_receiver_fn, assets_extra, as_text, checkpoint_path
        )
