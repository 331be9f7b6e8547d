"""The record of a run in MLflow. The only file that imports mlflow, and only if a run is tracked.

The process that ships to MLflow calls it. Tasks write journals and do not know MLflow. All calls use MlflowClient
with an explicit run id, because MLflow's fluent API would end the run at the end of its block.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import math
import os
import re
import shlex
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock

from runner.config.metric_names import is_of_evaluation, mode_of
from runner.config.schema import TrackingConfig
from runner.system import gc_pause
from runner.system.console import counted
from runner.system.exit_codes import USER_ERRORS
from runner.system.files import MODEL_CARD_FILE
from runner.system.redaction import mask_text
from runner.tracking.tracker import DatasetFacts, ExportedModel, Point, Tracker

MAX_NAME = 250
MAX_PARAM = 6000
MAX_TAG = 8000
"""MLflow's limits, in characters, for names and for the values of params and tags."""


_DESCRIPTION = "mlflow.note.content"
"""The tag that MLflow's pages show as the description of a run or a model."""

_CHANGED_TAG = "changed."
_CHANGE_ARROW = " -> "
"""A param that a resumed run has changed is a tag `changed.<param>`, with the text `<first value> -> <new value>`."""


class UniqueNames:
    """Makes names valid and keeps them different: if two names become equal, the second gets a suffix.

    Args:
      known: names that an earlier process has made. A name that got a suffix there keeps it, whichever comes first.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._owners: dict[str, str] = {}

    def clean(self, name: str) -> str:
        clean = clean_name(name)
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        with_suffix = f"{clean[: MAX_NAME - 9]}-{digest[:8]}"
        if with_suffix in self._known:
            return with_suffix
        owner = self._owners.setdefault(clean, name)
        return clean if owner == name else with_suffix


def clean_name(name: str) -> str:
    """Return `name` as MLflow allows it: letters, digits, `_ - . space : /`, and a normalized path."""
    parts = []
    for part in re.sub(r"[^\w\-. :/]", "_", name)[:MAX_NAME].split("/"):
        if not part.strip("."):  # `.` and `..` would be folders, and an empty one is no name
            part = "_" * max(len(part), 1)
        parts.append(part)
    text = re.sub(r"^\.\.", "__", "/".join(parts))
    return text[:MAX_NAME].rstrip("/")


def _column(metric: str) -> str:
    """Return MLflow's name of the column of a metric."""
    return f"metrics.`{clean_name(metric)}`"


def clean_text(value: Any, limit: int) -> str:
    """Return `value` as text that every database accepts, cut to `limit` characters."""
    # A command line in another encoding contains lone surrogates, which sqlite refuses; PostgreSQL refuses NUL.
    text = str(value).encode("utf-8", "replace").decode().replace("\0", "\\0")
    return text if len(text) <= limit else text[: limit - 1] + "…"


_VIEW = "mlflow.sharedViewState."
"""Beginning of the tag of an experiment that holds a view of its runs (MLflow 3.17)."""

MAX_METRICS = 1000
MAX_PARAMS_AND_TAGS = 100
MAX_BYTES = 500_000
"""Limits per request; MLflow's are 1000, 100 and a million."""

MAX_PARAMS_OF_A_RUN = 1000
"""Largest number of params per run: 10,000 take 13 s to record (measured), and MLflow's pages cannot show them."""

MAX_EXAMPLE_VALUES = 200_000
"""Largest number of values in a model's input example: a colour image of 256x256, which makes two files of 1 MB."""

LOCK_TIMEOUT_SECS = 120.0
"""Seconds to wait for another process that is creating the database (measured: 1.4-6.7 s)."""

QUIET = {
    # With MLflow's default of 7 retries a call takes 247 s when the server is down (measured). With its timeout of
    # 120 s per answer, the end of a run takes minutes when the server hangs.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "AWS_MAX_ATTEMPTS": "3",  # a file takes 3 s when S3 is away, 10 s with boto3's default of 5 (measured)
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # messages such as "Creating initial database tables"
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # it would break the progress line
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is for the summary
}
"""Environment variables of MLflow and boto3 -> values, used if they are not set."""


class MlflowTracker(Tracker):
    """Records in an MLflow server or database.

    Args:
      uri: tracking URI; a sqlite database is created if it does not exist.
      experiment: name of the MLflow experiment; created if it does not exist.
      started_at: when the run started, in seconds since 1970; recording it may have to wait for a server. None: now.
    """

    def __init__(self, uri: str, experiment: str, started_at: float | None = None) -> None:
        self.uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._experiment_id: str | None = None
        self._experiment_tags: Mapping[str, str] = {}
        self._run_id: str | None = None
        self._state_before: tuple[str, int | None] | None = None  # status and end time of the run before it was opened
        self._started_at = time.time() if started_at is None else started_at
        self._metric_names = UniqueNames()
        self._ranking_metric = "eval/loss"
        self._ranking_mode: str | None = None
        self._view_key = ""  # the key of the view of the experiment to which the address leads

    def prepare(self) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        with gc_pause.not_searched():
            import mlflow  # noqa: F401
        database = sqlite_path(self.uri)
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{database}.lock", timeout=LOCK_TIMEOUT_SECS):
                # Looked up under the lock: another process may have made it while this one waited.
                if not database.exists():
                    _make_database(database)

    def check(self) -> str:
        """Return that a run can be recorded, in words. Creates nothing. Called only by command=doctor.

        Raises:
          Exception: no run can be recorded; of MLflow or the system.
        """
        path = sqlite_path(self.uri)
        if path is not None:
            return _check_database(path.absolute())
        if not self.uri.startswith(("http://", "https://")):
            return "not tried: neither an SQLite file nor an HTTP server"
        self.prepare()
        from mlflow import MlflowClient

        MlflowClient(tracking_uri=self.uri).search_experiments(max_results=1)
        return "yes"

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        params_before: Mapping[str, str] = {}
        self._choose_ranking(params)
        # If a call failed halfway and is repeated, it continues the run that it created.
        run = self._open_run(run_id or self._run_id)
        if run is not None:
            self._client.update_run(self._run_id, status="RUNNING")
            self.set_tags(tags)
            params_before = run.data.params
        else:
            cleaned = {"mlflow.user": _user_name(), **_clean_tags(tags)}
            # MLflow refuses a run_name that differs from the one in the tags, so the name in the tags is taken.
            name = clean_text(cleaned.pop("mlflow.runName", name), MAX_NAME)
            started_at = round(self._started_at * 1000)
            run = self._client.create_run(self._experiment_id, started_at, cleaned, run_name=name)
            self._run_id = str(run.info.run_id)
        self._create_view()
        self._log_params(params_before, params)
        return self._run_id

    def join(self, run_id: str) -> bool:
        run = self._open_run(run_id)
        if run is None:
            return False
        params = dict(run.data.params)
        for name, text in run.data.tags.items():
            if name.startswith(_CHANGED_TAG):
                params[name.removeprefix(_CHANGED_TAG)] = text.rpartition(_CHANGE_ARROW)[2]
        self._choose_ranking(params)
        self._create_view()
        return True

    def _choose_ranking(self, params: Mapping[str, Any]) -> None:
        """Note by which metric `address` sorts the runs: that of a sweep, else that of `checkpoint.keep_best`. If
        `params` have neither, nothing changes.
        """
        for key in ("sweep", "checkpoint.keep_best"):
            metric = params.get(f"{key}.metric")
            if metric not in (None, "", "None"):  # params that come from MLflow are texts
                mode = params.get(f"{key}.mode")
                self._ranking_metric = str(metric)
                self._ranking_mode = mode if mode in ("min", "max") else None
                return

    def _create_view(self) -> None:
        """Create a view of the experiment's runs in MLflow, as its own `Views > Share` does: the best run first, with
        columns of metrics, of which MLflow shows none by itself.
        """
        metrics = dict.fromkeys([self._ranking_metric, "eval/loss", "train/loss"])  # each once
        columns = [_column(name) for name in metrics]
        view = {
            "orderByKey": columns[0],
            "orderByAsc": self._is_ascending,
            "selectedColumns": [*columns, "attributes.`Source`"],
        }
        view_json = json.dumps(view)
        digest = hashlib.sha256(view_json.encode()).hexdigest()
        key = f"runner-{digest[:10]}"
        # MLflow 3 takes an experiment that does not say so for one of language models, whose pages show no metrics.
        tags = {_VIEW + key: view_json, "mlflow.experimentKind": "custom_model_development"}
        with _ignoring_error("PERMISSION_DENIED"):  # then the address has the order, without columns
            for name, value in tags.items():
                if name not in self._experiment_tags:
                    self._client.set_experiment_tag(self._experiment_id, name, value)
            self._view_key = key

    @property
    def _is_ascending(self) -> bool:
        return mode_of(self._ranking_metric, self._ranking_mode) == "min"

    def log_points(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = []
        for point in points:
            name = self._metric_names.clean(point.name)
            time_ms = max(0, round(point.time * 1000))
            metrics.append(Metric(name, point.value, time_ms, point.step))
        self._log_in_batches(metrics=metrics)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self._log_in_batches(tags=_run_tags(tags))

    def set_description(self, text: str, replaces: str) -> None:
        before = self._client.get_run(self._run_id).data.tags.get(_DESCRIPTION, replaces)
        if before.startswith(replaces):
            self.set_tags({_DESCRIPTION: text})

    def log_file(self, path: Path, folder: str = "") -> None:
        self._client.log_artifact(self._run_id, str(path), folder or None)

    def log_image(self, name: str, path: Path, step: int, time: float) -> None:
        from PIL import Image

        key = re.sub(r"[^a-zA-Z0-9_\-./ ]", "_", name)[:MAX_NAME]
        with Image.open(path) as image:
            image.load()
            self._client.log_image(
                self._run_id, image, key=key, step=step, timestamp=round(time * 1000), synchronous=True
            )

    def log_input(self, dataset: DatasetFacts) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entity = Dataset(
            name=clean_text(dataset.name, MAX_NAME),
            digest=dataset.digest,
            source_type="code",
            source=clean_text(json.dumps(dataset.source, default=str), MAX_PARAM),
            profile=json.dumps(dataset.profile, default=str),
        )
        tag = InputTag("mlflow.data.context", dataset.context)
        self._client.log_inputs(self._run_id, [DatasetInput(entity, [tag])])

    def log_model(self, model: ExportedModel) -> None:
        from mlflow.entities import LoggedModelOutput, Metric

        run = self._client.get_run(self._run_id)
        model_id = self._model_id_of(model)
        # The output is logged last. A model that has one was logged completely, by an earlier attempt, and MLflow does
        # not take an output twice.
        if model_id is None or model_id not in [output.model_id for output in run.outputs.model_outputs]:
            with tempfile.TemporaryDirectory(prefix="runner-") as scratch, gc_pause.not_searched():
                folder = Path(scratch) / "model"
                with warnings.catch_warnings(record=True):  # advice for hand-written models
                    _save_model(model, folder)
                if model_id is None:
                    model_id = self._create_model(model, run.data.params)
                self._client.log_model_artifacts(model_id, str(folder))
            self._client.finalize_logged_model(model_id, "READY")
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model_id, model.step)])
        evaluation_metrics = self._evaluation_metrics_at(model.step, run.data.metrics)
        # The run already has these values in MLflow, which keeps one value per step and time.
        model_metrics = []
        for metric in evaluation_metrics:
            model_metrics.append(Metric(metric.key, metric.value, metric.timestamp, metric.step, model_id))
        self._log_in_batches(metrics=model_metrics)
        if model.registered_name is not None:
            version_description = f"Step {model.step} of run {run.info.run_name}"
            if evaluation_metrics:
                values = [f"{metric.key} {metric.value:.4g}" for metric in evaluation_metrics]
                version_description += f": {', '.join(values)}"
            self._register(model, model_id, version_description)

    def _model_id_of(self, model: ExportedModel) -> str | None:
        """Return MLflow's id of `model`, which an earlier attempt may have logged in part; None: it has none."""
        runs_filter = f"source_run_id = '{self._run_id}'"
        path = clean_text(model.path, MAX_TAG)
        for logged in self._client.search_logged_models([self._experiment_id], runs_filter):  # the newest first
            if logged.tags.get("path") == path:
                return str(logged.model_id)
        return None

    def _create_model(self, model: ExportedModel, run_params: Mapping[str, str]) -> str:
        """Return the id of a new logged model, which has no files yet."""
        tags = {"path": clean_text(model.path, MAX_TAG), _DESCRIPTION: clean_text(_card_of(model), MAX_TAG)}
        created = self._client.create_logged_model(
            self._experiment_id,
            clean_text(model.name, MAX_NAME),
            self._run_id,
            params={name: text for name, text in run_params.items() if name.startswith("model.params.")},
            model_type="SavedModel",
            tags=tags,
        )
        return str(created.model_id)

    def _evaluation_metrics_at(self, step: int, names: Iterable[str]) -> list[Any]:
        """Return the last value of each metric from evaluations of the checkpoint of `step`."""
        found = []
        for name in names:
            if is_of_evaluation(name):
                history = self._client.get_metric_history(self._run_id, name)
                of_step = [metric for metric in history if metric.step == step]
                if of_step:
                    found.append(max(of_step, key=lambda metric: metric.timestamp))
        return found

    def _register(self, model: ExportedModel, model_id: str, about: str) -> None:
        """Make the model a version of a registered model, with its alias and a description."""
        import mlflow

        # MLflow 3 looks there, and not where its client is, for the model of a version.
        mlflow.set_tracking_uri(self.uri)
        name = model.registered_name
        with _ignoring_error("RESOURCE_ALREADY_EXISTS"):
            self._client.create_registered_model(name)
        source = f"models:/{model_id}"
        version = None
        for known in self._client.search_model_versions(f"run_id = '{self._run_id}'"):
            if known.name == name and known.source == source:
                version = known
                break
        if version is None:
            tags = {"step": str(model.step)}
            version = self._client.create_model_version(
                name, source, self._run_id, tags, description=about, model_id=model_id
            )
        if model.alias is not None:
            self._client.set_registered_model_alias(name, model.alias, version.version)

    def is_refusal(self, error: Exception) -> bool:
        from mlflow.exceptions import MlflowException

        if isinstance(error, (*USER_ERRORS, RuntimeError)):  # of the code that reads the config or draws the curves
            return True
        if isinstance(error, MlflowException):
            status = error.get_http_status_code()
        else:  # of requests; boto3 and others have no such response
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", 500)
        return bool(status < 500 and status not in (408, 429))  # these two mean: later

    def end(self, status: str, time: float) -> None:
        self._client.set_terminated(self._run_id, status=status, end_time=round(time * 1000))

    def leave(self, status: str, time: float) -> None:
        before, end_time = self._state_before or ("RUNNING", None)
        if before == "RUNNING":  # the run is new, or its supervisor was killed
            self.end(status, time)
        elif self._client.get_run(self._run_id).info.status != before:
            self._client.set_terminated(self._run_id, status=before, end_time=end_time)

    def address(self) -> str | None:
        if self._run_id is None:
            return None
        page = f"#/experiments/{self._experiment_id}/runs"
        order = f"viewStateShareKey={self._view_key}"
        if not self._view_key:
            key = quote(_column(self._ranking_metric))
            is_ascending = str(self._is_ascending).lower()
            order = f"orderByKey={key}&orderByAsc={is_ascending}"
        ranking = f"{page}?workflowType=machine_learning&{order}"
        if re.match(r"https?://", self.uri):
            shown = mask_text(self.uri, ()).rstrip("/")
            return f"{shown}/{page}/{self._run_id}\n{shown}/{ranking}"
        path = sqlite_path(self.uri)
        uri = mask_text(self.uri, ())
        if path is not None and path.is_relative_to(Path.cwd()):
            uri = _sqlite_uri(path.relative_to(Path.cwd()))
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)}\nhttp://127.0.0.1:5000/{ranking}"

    def running_on(self, host: str) -> Mapping[str, str]:
        self._connect()
        host = clean_text(host, MAX_TAG).replace("'", "")
        running_here = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
        locks = {}
        for run in self._client.search_runs([self._experiment_id], running_here, max_results=100):
            lock = run.data.tags.get("lock", "")
            if lock and run.info.run_id != self._run_id:
                locks[run.info.run_id] = lock
        return locks

    def settle(self, run_id: str, status: str, tags: Mapping[str, str], time: float) -> None:
        if self._client.get_run(run_id).info.status == "RUNNING":
            self._client.log_batch(run_id, tags=_run_tags(tags), synchronous=True)
            self._client.set_terminated(run_id, status=status, end_time=round(time * 1000))
            if run_id == self._run_id:
                self._state_before = (status, round(time * 1000))

    def _log_in_batches(self, **entities: Sequence[Any]) -> None:
        """Log metrics, params or tags, in requests of the size that MLflow accepts."""
        for kind, items in entities.items():
            max_items = MAX_METRICS if kind == "metrics" else MAX_PARAMS_AND_TAGS
            for batch in _batches(items, max_items):
                # Synchronous, since errors would be lost with MLFLOW_ENABLE_ASYNC_LOGGING in the environment.
                self._client.log_batch(self._run_id, **{kind: batch}, synchronous=True)

    def _connect(self) -> None:
        """Import MLflow, make a client, and find the experiment or create it; once.

        Raises:
          ValueError: the experiment is deleted.
          ModuleNotFoundError: a package for its files is not installed.
        """
        if self._experiment_id is not None:
            return
        self.prepare()
        database = sqlite_path(self.uri)
        location = None
        if database is not None:
            # An absolute path, because MLflow's default for sqlite is relative to the directory of the reader.
            folder = re.sub(r"[^A-Za-z0-9-]", "_", self._experiment)[:100]
            location = (database.parent / "mlartifacts" / folder).absolute().as_uri()
        with gc_pause.not_searched():
            from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)
        name = clean_text(self._experiment, 500)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            with _ignoring_error("RESOURCE_ALREADY_EXISTS"):  # another run has created it in the meantime
                self._client.create_experiment(name, artifact_location=location)
            experiment = self._client.get_experiment_by_name(name)
        if experiment.lifecycle_stage != "active":
            raise ValueError(
                f"The MLflow experiment {name!r} is deleted in {self.uri}. Restore it with `mlflow experiments "
                f"restore -x {experiment.experiment_id}`, or set another tracking.experiment."
            )
        if experiment.artifact_location.startswith("s3:") and find_spec("boto3") is None:
            # Before a run is begun: its files would be refused one by one, and it would end without them.
            where = experiment.artifact_location
            raise ModuleNotFoundError(f"The MLflow experiment {name!r} keeps files in {where}. Do: pip install boto3")
        self._experiment_id = str(experiment.experiment_id)
        self._experiment_tags = experiment.tags

    def _open_run(self, run_id: str | None) -> Any:
        """Return the run, which this tracker records from now on; None if there is none here, or it was deleted."""
        self._connect()
        run = None
        if run_id:
            with _ignoring_error("RESOURCE_DOES_NOT_EXIST"):
                run = self._client.get_run(run_id)
        if run is None or run.info.lifecycle_stage != "active":
            return None
        self._run_id = run_id
        self._state_before = (run.info.status, run.info.end_time)
        self._metric_names = UniqueNames(run.data.metrics)
        return run

    def _log_params(self, earlier: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Log new parameters. A parameter that a resumed run changed becomes a tag: MLflow refuses the change.

        Args:
          earlier: the params that the run has in MLflow, under cleaned names.
        """
        from mlflow.entities import Param

        names = UniqueNames()
        values = {names.clean(name): value for name, value in params.items()}
        texts = {}
        for name, value in values.items():
            # A new parameter that is null is not logged; a known one that has become null is.
            if value is not None or name in earlier:
                texts[name] = clean_text(value, MAX_PARAM)
        recorded = dict(list(texts.items())[:MAX_PARAMS_OF_A_RUN])
        new = []
        tags = {}
        for name, text in recorded.items():
            if name not in earlier:
                new.append(Param(name, text))
            elif earlier[name] != text:
                tags[f"{_CHANGED_TAG}{name}"] = f"{earlier[name]}{_CHANGE_ARROW}{text}"
        self._log_in_batches(params=new)
        if len(texts) > len(recorded):
            tags["params_left_out"] = f"{len(texts) - len(recorded)} params are left out; config.yaml has all"
        self.set_tags(tags)


@contextmanager
def _ignoring_error(code: str) -> Iterator[None]:
    """Ignore an error of MLflow with this `code` inside this context."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def tracking_uri(settings: TrackingConfig, env: Mapping[str, str], cwd: Path) -> str:
    """Return where MLflow records: `tracking.uri`, or MLFLOW_TRACKING_URI, or `sqlite:///mlflow.db` in `cwd`."""
    uri = settings.uri or env.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    path = sqlite_path(uri)
    if path is None:
        return uri
    _, mark, options = uri.partition("?")
    return _sqlite_uri(cwd / path) + mark + options


def experiment_name(settings: TrackingConfig, env: Mapping[str, str]) -> str:
    """Return the MLflow experiment: `tracking.experiment`, or MLFLOW_EXPERIMENT_NAME, or `runner`."""
    return settings.experiment or env.get("MLFLOW_EXPERIMENT_NAME") or "runner"


def _save_model(model: ExportedModel, folder: Path) -> None:
    """Save a SavedModel as an MLflow model, which `runner/tracking/mlflow_model.py` loads. Does not import
    TensorFlow.
    """
    import mlflow.pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Any:
        specs = [TensorSpec(_numpy_type(kind), tuple(shape), name) for name, (kind, shape) in tensors.items()]
        return Schema(specs)

    signature = ModelSignature(schema(model.inputs), schema(model.outputs))
    # Otherwise MLflow infers them, which takes 10 s.
    requirements = [f"{name}=={version(name)}" for name in ("mlflow", "tensorflow")]
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(Path(__file__).with_name("mlflow_model.py")),
        artifacts={"saved_model": str(model.path)},
        signature=signature,
        input_example=_input_example(model.inputs),
        pip_requirements=requirements,
    )
    card = _card_of(model)
    if card:
        (folder / MODEL_CARD_FILE).write_text(card, encoding="utf-8")


def _card_of(model: ExportedModel) -> str:
    """Return the text of the model card for the folder of an MLflow model; '' if the export has none."""
    card = model.path / MODEL_CARD_FILE
    if not card.exists():  # of an earlier version
        return ""
    text = card.read_text(encoding="utf-8")
    return text.replace('load(".",', f'load("artifacts/{model.path.name}",')  # the SavedModel is below that folder


def _input_example(inputs: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Any] | None:
    """Return a request with one example of zeros and empty texts, which reveals no data of the user.

    None if the example would be too large.
    """
    import numpy as np

    if not inputs:
        return None
    example = {}
    num_values = 0
    for name, (kind, shape) in inputs.items():
        dtype = _numpy_type(kind)
        sizes = [abs(size) for size in shape]  # -1 stands for any size
        num_values += math.prod(sizes)
        if num_values > MAX_EXAMPLE_VALUES:
            return None
        empty = "" if dtype.kind == "O" else 0
        example[name] = np.full(sizes, empty, dtype)
    return example


def _numpy_type(kind: str) -> Any:
    """Return the NumPy type of a tensor of TensorFlow's type `kind`."""
    import numpy as np

    # NumPy has strings as objects, and no bfloat16.
    return np.dtype({"string": "object", "bfloat16": "float32"}.get(kind, kind))


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a sqlite URI (`sqlite:///relative`, `sqlite:////absolute`); None for other URIs."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0]))


def _sqlite_uri(path: Path) -> str:
    # SQLAlchemy decodes %20 and ignores what follows `?`.
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def _check_database(path: Path) -> str:
    """Return that MLflow can write its database `path`, in words."""
    import sqlite3  # not at the top: every supervisor and task imports this module

    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not os.access(nearest, os.W_OK):
        raise OSError(f"{nearest} is not writable")
    if nearest != path:
        return "yes: the first run creates the file"
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM runs").fetchone()
    return f"yes: a database with {counted(count, 'run')}"


def _make_database(path: Path) -> None:
    """Create an empty database under a temporary name and rename it; a killed process then leaves no half of one."""
    from mlflow import MlflowClient

    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    MlflowClient(tracking_uri=_sqlite_uri(temporary))  # any request makes MLflow create the tables
    os.replace(temporary, path)


def _batches(items: Sequence[Any], max_items: int) -> Iterator[list[Any]]:
    """Yield `items` in lists for one request each, limited by number and by size as JSON."""
    batch: list[Any] = []
    size = 0
    for item in items:
        item_size = len(json.dumps([item.key, item.value])) + 100  # 100 bytes for field names and a timestamp
        if batch and (len(batch) == max_items or size + item_size > MAX_BYTES):
            yield batch
            batch = []
            size = 0
        batch.append(item)
        size += item_size
    if batch:
        yield batch


def _run_tags(tags: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in _clean_tags(tags).items()]


def _clean_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    names = UniqueNames()
    return {names.clean(name): clean_text(value, MAX_TAG) for name, value in tags.items()}


def _user_name() -> str:
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return "unknown"
