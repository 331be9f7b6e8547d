"""Tracker: the interface through which a run is recorded, with its metrics, tags, files and models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.system.redaction import mask_text

_ADVICE = {
    "401": "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.",
    "Invalid Host": "It does not know its name in this address: start it with --allowed-hosts=<host>:<port>.",
    "403": "This user may only read there: ask for the right to edit, or choose another tracking.experiment.",
}
"""HTTP status, or words, with which MLflow's server refuses a request -> what to do."""

MAX_LINE = 400
"""Largest number of characters of an error in a message."""


@dataclass(frozen=True)
class ExportedModel:
    """An exported model, from the journal.

    Attributes:
      name: its name in MLflow.
      path: path of the SavedModel.
      inputs, outputs: those of its default signature: name -> (dtype, shape with -1 for any size).
      step: global step of the exported checkpoint.
      registered_name: name of the registered model of which it becomes a version; None: not registered.
      alias: alias of that version; None: no alias.
    """

    name: str
    path: Path
    inputs: Mapping[str, tuple[str, Sequence[int]]]
    outputs: Mapping[str, tuple[str, Sequence[int]]]
    step: int = 0
    registered_name: str | None = None
    alias: str | None = None


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about an input, found without reading it.

    Attributes:
      context: its use: train, eval, eval_<name>, predict.
      name: name of its input_fn, or of its file.
      digest: digest of its description: function, params, files with sizes and times.
      source: dotted name of its input_fn, its params and files.
      profile: numbers of batches or examples, if known.
    """

    context: str
    name: str
    digest: str
    source: Mapping[str, Any]
    profile: Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """One value of one metric. `time` is in seconds since the epoch."""

    name: str
    value: float
    step: int
    time: float


class TrackerError(RuntimeError):
    """A user's tracker failed; the message names the line of the user's code."""


class Tracker:
    """Records one run. Every method may raise errors of the backend; nothing is retried here.

    These methods record nothing; backends override them.
    """

    def prepare(self) -> None:
        """Import and create what takes long without waiting for a server."""

    def start(self, run_id: str | None, name: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> str | None:
        """Create the run, or continue the run `run_id`. Return its id; None if nothing is recorded."""
        return None

    def join(self, run_id: str) -> bool:
        """Open the run `run_id` without changing params, tags or status. Return False if there is no such run."""
        return False

    def log_points(self, points: Sequence[Point]) -> None:
        """Record metrics, in order."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Add tags to the run."""

    def set_description(self, text: str, replaces: str) -> None:
        """Set the run's description, in Markdown, if it has none or one that begins with `replaces`."""

    def log_file(self, path: Path, folder: str = "") -> None:
        """Keep a copy of a file or folder with the run, in `folder` of the run's files; '': the top."""

    def log_image(self, name: str, path: Path, step: int, time: float) -> None:
        """Keep a copy of a PNG of a step with the run."""

    def log_input(self, dataset: DatasetFacts) -> None:
        """Record the facts of an input."""

    def log_model(self, model: ExportedModel) -> None:
        """Keep a copy of an exported model with the run, as a model that MLflow can load and serve."""

    def end(self, status: str, time: float) -> None:
        """Close the run as FINISHED, FAILED, SCHEDULED (interrupted) or KILLED, as of `time` in seconds since 1970."""

    def leave(self, status: str, time: float) -> None:
        """Restore the status that the run had before it was opened; a new run is closed as of `time`.

        Args:
          status: how the command or start has ended, as in `end`.
        """

    def close(self) -> None:
        """Release everything, whether or not everything was recorded. Called last."""

    def is_refusal(self, error: Exception) -> bool:
        """Report whether `error`, which one of these methods raised, will be raised again: nobody was away or full."""
        return True

    def address(self) -> str | None:
        """Return where the user finds the run: a URL, or the command that shows it; more of them on lines of their own.

        None: nowhere.
        """
        return None

    def running_on(self, host: str) -> Mapping[str, str]:
        """Return the other runs of this experiment that are RUNNING with the tag host=`host`: id -> its tag `lock`."""
        return {}

    def settle(self, run_id: str, status: str, tags: Mapping[str, str], time: float) -> None:
        """Close another run, as of `time` in seconds since the epoch. One that is not RUNNING is left alone."""


_ALIASED = ("best", "final", "latest")
"""Names of exporters; `export.alias` goes to the model of the first one that exported."""


def exported_models(
    lines: Sequence[Mapping[str, Any]], prefix: str = "", registered_name: str | None = None, alias: str | None = None
) -> list[ExportedModel]:
    """Return the newest existing model of each folder in a journal: best, final, latest.

    Args:
      prefix: precedes each name.
      registered_name, alias: those in the registry. One model gets the alias: the best, else the final, else the
        latest.
    """
    newest: dict[Path, tuple[Path, Mapping[str, Any]]] = {}
    for line in lines:
        if line.get("tensors"):
            path = Path(str(line["path"]))
            if path.is_dir():
                newest[path.parent] = (path, line)
    names = [folder.name for folder in newest]
    aliased_folder = next((name for name in (*_ALIASED, *names) if name in names), None)
    models = []
    for folder, (path, line) in newest.items():
        name = f"{prefix}-{folder.name}" if prefix else folder.name
        model_alias = alias if folder.name == aliased_folder else None
        model = ExportedModel(
            name,
            path,
            line["tensors"]["inputs"],
            line["tensors"]["outputs"],
            step=line.get("step") or 0,
            registered_name=registered_name,
            alias=model_alias,
        )
        models.append(model)
    return models


def points_of(line: Mapping[str, Any]) -> list[Point]:
    """Return the metrics in one line of a journal; none in a line that notes an event."""
    if "event" in line:
        return []
    return [Point(name, value, line["step"], line["time"]) for name, value in line.get("metrics", {}).items()]


def describe(error: Exception) -> str:
    """Return an error of a backend in one line, without passwords; for a user's class with its own lines."""
    if isinstance(error, TrackerError):
        return mask_text(str(error), ())
    lines = str(error).strip().splitlines()
    line = mask_text(lines[0], ()) if lines else type(error).__name__
    line = _explain_request(line)
    return line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"


def _explain_request(line: str) -> str:
    """Return what an error means that MLflow reports of a request to its server; another error as it is."""
    refused = re.match(r"API request to endpoint (\S+) failed with error code (\d+)", line)
    if refused:
        endpoint, code = refused.groups()
        if code in _ADVICE:
            case = "Invalid Host" if "Invalid Host" in line else code
            advice = _ADVICE[case]
            return f"MLflow's server refuses {endpoint} (HTTP {code}). {advice}"
        if code.startswith("5"):  # MLflow 3.18 and newer, which do not say at which address
            return f"MLflow's server answers {endpoint} with HTTP {code}: its log has the reason."
    request = re.match(r"API request to (\w+://[^/\s]+)([^\s?]*)\S* failed with exception", line)
    if not request:
        return line
    server, endpoint = request.groups()
    broken = re.search(r"too many (\d+) error responses", line)
    if broken:  # MLflow 3.17
        return f"MLflow's server answers {endpoint} with HTTP {broken[1]}: its log has the reason."
    reasons = re.findall(r"\[Errno -?\d+\] ([^'\")]+)|(timed out)", line)
    reason = "".join(reasons[-1]) if reasons else line.partition("failed with exception ")[2]
    return f"{server} cannot be reached: {reason}. Start that server, or choose another tracking.uri."
