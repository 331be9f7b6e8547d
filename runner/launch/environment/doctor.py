"""command=doctor: report whether a run can start here, what it would use, and how to solve each problem.

Each check returns a `Section`: rows to print and the problems that it found. The machine, the environment and the
TensorFlow probe are arguments of the checks, so that tests can choose them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import runner
from runner.config.schema import Config, TrackingConfig
from runner.system.child_process import describe_exit
from runner.system.console import format_bytes, print_table
from runner.system.files import free_bytes
from runner.system.memory import free_memory
from runner.system.redaction import masked_value
from runner.system.start_status import START_STATUS, shows_live
from runner.tf_private import legacy_keras
from runner.tracking.mlflow_tracker import MlflowTracker, experiment_name, tracking_uri
from runner.tracking.tracker import describe

PROBE_SECS = 180
"""Seconds that TensorFlow's import and test may take: a minute on a slow disk without cached bytecode."""

FEW_BYTES = 2 * 2**30
"""Bytes of free memory below which there is a warning. A task of a small model takes about 0.7 GB (measured)."""

LITTLE_DISK = 2**30
"""Free bytes of disk below which checkpoints may not fit."""
NO_DISK = 50 * 2**20
"""Free bytes of disk below which a run cannot start."""


@dataclass(frozen=True)
class Problem:
    """A problem of this machine or environment.

    Attributes:
      is_fatal: no run can start; False: runs start, but are slower or lack something.
    """

    what: str
    do: str
    is_fatal: bool = False

    @property
    def kind(self) -> str:
        return "error" if self.is_fatal else "warning"


@dataclass(frozen=True)
class Section:
    """The findings about one subject."""

    title: str
    rows: Sequence[tuple[str, str]]
    problems: Sequence[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """The report of a process that imported TensorFlow.

    Attributes:
      facts: as `runner.task.tensorflow_probe` prints them; None: the process did not finish.
      failure: if it did not finish: how it ended.
      said: its stderr.
    """

    facts: Mapping[str, Any] | None
    failure: str = ""
    said: str = ""


def show(config: Config, env: Mapping[str, str]) -> dict[str, Any]:
    """Print and return the findings, then the problems; `can_start` tells whether a run can start here."""
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for section in _sections(config, env):  # printed one by one, so that the user sees progress
        found[section.title] = print_table(section.title, ["", ""], section.rows)
        print(flush=True)
        problems += section.problems
    problems.sort(key=lambda problem: not problem.is_fatal)
    if problems:
        rows = [[problem.kind, problem.what, problem.do] for problem in problems]
        print_table("problems", ["", "what is wrong", "what to do"], rows)
        print()
    is_fit = not any(problem.is_fatal for problem in problems)
    if is_fit:
        print("A run can start here.", flush=True)
    else:
        print("No run can start here: see the errors above.", flush=True)
    return {"can_start": is_fit, **found, "problems": [asdict(problem) for problem in problems]}


def _sections(config: Config, env: Mapping[str, str]) -> Iterator[Section]:
    """Yield the findings of each check as soon as it has run."""
    yield check_python(env)
    yield check_tensorflow(run_probe(env), env)
    folders = (Path.cwd(), Path(tempfile.gettempdir()))
    free = {folder: free_bytes(folder) for folder in folders}
    yield check_machine(Path.cwd(), free_memory(), free)
    yield check_tracking(config.tracking, env, Path.cwd())


# --- Python and packages ---------------------------------------------------------------------------------------------


def check_python(env: Mapping[str, str], requirements: Sequence[str] | None = None) -> Section:
    """Check that Python and the dependencies have supported versions, and that Python saves compiled bytecode.

    Args:
      requirements: the dependencies; None: those of the installed distribution.
    """
    supported = ""
    installed: Sequence[str] = []
    # Not found if the package is a checkout on the path that is not installed.
    with suppress(metadata.PackageNotFoundError):
        about = metadata.metadata("estimator-runner")
        supported = about["Requires-Python"] or ""
        installed = metadata.requires("estimator-runner") or []
    rows = [
        ("runner", f"{runner.__version__} in {Path(runner.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
    ]
    problems = []
    if supported and not SpecifierSet(supported).contains(platform.python_version(), prereleases=True):
        what = f"Python {platform.python_version()} is not supported ({supported})"
        advice = "make an environment with a supported Python: python3.12 -m venv .venv"
        problems.append(Problem(what, advice, is_fatal=True))
    if requirements is None:
        problems += _find_unmet(installed)
        problems += find_tf_keras_problems()
    else:
        problems += _find_unmet(requirements)
    if any(metadata.distributions(name="tf-runner")):  # both have the package `runner`: pip removes the files of both
        advice = "pip uninstall tf-runner, then pip install --force-reinstall --no-deps estimator-runner"
        problems.append(Problem("tf-runner, the name of estimator-runner before, is installed, too", advice))
    if env.get("PYTHONDONTWRITEBYTECODE"):
        what = "PYTHONDONTWRITEBYTECODE is set, so each start compiles all modules again: 10 s instead of 4"
        problems.append(Problem(what, "unset PYTHONDONTWRITEBYTECODE"))
    return Section("python", rows, problems)


def _find_unmet(requirements: Sequence[str]) -> Iterator[Problem]:
    """Yield the packages that are not installed, or have other versions."""
    for text in requirements:
        needed = Requirement(text)
        # With an empty extra, the marker is false for a package that only an extra needs.
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        remedy = f"pip install '{needed}'"
        try:
            found = Version(metadata.version(needed.name))
        except metadata.PackageNotFoundError:
            yield Problem(f"{needed.name} is not installed", remedy, is_fatal=True)
            continue
        if not needed.specifier.contains(found, prereleases=True):  # it may work, but is not tested
            yield Problem(f"{needed.name} {found} is installed, not {needed.specifier}", remedy)


def find_tf_keras_problems() -> list[Problem]:
    """Return the problem of a TensorFlow that the installed tf_keras does not support; [] if there is none.

    pip leaves an old tf_keras in place if only a newer TensorFlow was asked for.
    """
    try:
        demanded = [Requirement(text) for text in metadata.requires("tf-keras") or []]
        tf_keras = metadata.version("tf-keras")
        tensorflow = Version(metadata.version("tensorflow"))
    except metadata.PackageNotFoundError:
        return []
    of_tensorflow = [requirement for requirement in demanded if requirement.name == "tensorflow"]
    if all(requirement.specifier.contains(tensorflow, prereleases=True) for requirement in of_tensorflow):
        return []
    what = f"TensorFlow {tensorflow} is installed beside tf_keras {tf_keras}, which is not made for it"
    return [Problem(what, "pip install 'estimator-runner[classic]' in another environment")]


# --- TensorFlow ------------------------------------------------------------------------------------------------------


def run_probe(env: Mapping[str, str], timeout_secs: float = PROBE_SECS) -> Probe:
    """Run the TensorFlow probe in a separate process, which takes seconds: with a live line on a terminal."""
    if shows_live("auto", sys.stderr):
        START_STATUS.show("importing TensorFlow")
    # Level 0, because TensorFlow logs the reason for a missing GPU as INFO.
    given = {**env, "TF_CPP_MIN_LOG_LEVEL": "0"}
    command = [sys.executable, "-m", "runner.task.tensorflow_probe"]
    try:
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout_secs, check=False)
    except subprocess.TimeoutExpired:
        return Probe(None, f"has not finished within {timeout_secs:.0f} s")
    finally:
        START_STATUS.stop()
    if done.returncode:
        return Probe(None, describe_exit(done.returncode), done.stderr)
    return Probe(json.loads(done.stdout.splitlines()[-1]), said=done.stderr)


def check_tensorflow(probe: Probe, env: Mapping[str, str], dev: Path = Path("/dev")) -> Section:
    """Check that TensorFlow can be imported, with a Keras that model_fns can use, and computes on each device; report
    why there is no GPU.

    Args:
      dev: the folder with the system's file for each NVIDIA GPU.
    """
    title = "tensorflow"
    problems = _find_keras_problems(env)
    facts = probe.facts
    if facts is None:
        written = [line.strip() for line in probe.said.splitlines() if line.strip()]
        last = written[-1] if written else "it wrote nothing"
        what = f"a process that imports TensorFlow and multiplies two matrices {probe.failure}: {last}"
        problems.append(Problem(what, _remedy_for_import(probe, env), is_fatal=True))
        return Section(title, [("TensorFlow", "cannot be used")], problems)
    build = _describe_build(facts)
    rows = [
        ("TensorFlow", f"{facts['tensorflow']}, built for {build}; imported in {facts['import_secs']} s"),
        ("Keras", f"{facts['keras']}; tf.keras is {facts['tf_keras']}"),
    ]
    has_gpu = False
    for device in facts["devices"]:
        name = device["name"]
        has_gpu = has_gpu or device["kind"] == "GPU"
        rows.append((name, _describe_device(device)))
        if device["error"]:
            advice = "pip install 'estimator-runner[gpu]', or hide it: CUDA_VISIBLE_DEVICES=-1"
            is_fatal = device["kind"] == "CPU"
            problems.append(Problem(f"{name} does not compute: {device['error']}", advice, is_fatal))
    if not has_gpu:
        why, problem = _why_no_gpu(probe, env, dev)
        rows.append(("GPU", f"none: {why}"))
        if problem is not None:
            problems.append(problem)
    return Section(title, rows, problems)


def _describe_build(facts: Mapping[str, Any]) -> str:
    """Return for which devices TensorFlow was built."""
    if facts["cuda"]:
        return f"CUDA {facts['cuda']}, cuDNN {facts['cudnn']}"
    if facts["rocm"]:
        return "ROCm"
    return "CPU only"


def _describe_device(device: Mapping[str, Any]) -> str:
    """Return what is known of a device; `computes` if that is all."""
    known = []
    if device["model"]:
        known.append(device["model"])
    if device["compute_capability"]:
        capability = ".".join(map(str, device["compute_capability"]))
        known.append(f"compute capability {capability}")
    return ", ".join(known) or "computes"


def _find_keras_problems(env: Mapping[str, str]) -> list[Problem]:
    problems = []
    if env.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        what = f"KERAS_BACKEND={env['KERAS_BACKEND']}: a model_fn needs Keras on TensorFlow"
        problems.append(Problem(what, "unset KERAS_BACKEND", is_fatal=True))
    if env.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true") and find_spec("tf_keras") is None:
        what = "TF_USE_LEGACY_KERAS selects Keras 2, but the package tf_keras is not installed"
        advice = f"unset TF_USE_LEGACY_KERAS, or {legacy_keras.installation()}"
        problems.append(Problem(what, advice, is_fatal=True))
    return problems


def _remedy_for_import(probe: Probe, env: Mapping[str, str]) -> str:
    """Return the remedy for a TensorFlow that cannot be used."""
    if "XLA_FLAGS" in probe.said and "XLA_FLAGS" in env:
        return "unset XLA_FLAGS, or correct it"
    if "SIGILL" in probe.failure:
        return "this processor lacks instructions that TensorFlow's wheels use (AVX): use another machine"
    if "SIGKILL" in probe.failure:
        return "give this machine or container more memory"
    return "pip install --force-reinstall estimator-runner, in a new environment"


def _why_no_gpu(probe: Probe, env: Mapping[str, str], dev: Path) -> tuple[str, Problem | None]:
    """Return why TensorFlow sees no GPU, and the problem if the machine has one."""
    assert probe.facts is not None
    found = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if not found and not (dev / "nvidiactl").exists():
        return "this machine has no NVIDIA GPU, or its driver is not loaded or not passed to this container", None
    shown = ", ".join(found) or "nvidiactl"
    has_gpu = f"this machine has a GPU ({shown})"
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none"):
        why = f"CUDA_VISIBLE_DEVICES={visible!r} hides them"
        do = "unset CUDA_VISIBLE_DEVICES, unless you want to train on the CPU"
        return why, Problem(f"{has_gpu}, but {why}", do)
    if not probe.facts["cuda"]:
        why = "this TensorFlow is built for CPUs only"
        return why, Problem(f"{has_gpu}, but {why}", "pip install 'estimator-runner[gpu]'")
    said = _last_line_about_cuda(probe.said)
    needed = f"check with nvidia-smi that the driver supports CUDA {probe.facts['cuda']}"
    do = f"pip install 'estimator-runner[gpu]'; if that does not help, {needed}"
    return said, Problem(f"{has_gpu}, but TensorFlow does not use it: {said}", do)


_WORDS_OF_CUDA = (
    "dlopen",
    "cuinit",
    "cuda drivers",
    "cannot register",
    "driver version",
    "libcu",
    "skipping registering",
)
"""Words, in lower case. A line of TensorFlow's log with one of them is about CUDA."""


def _last_line_about_cuda(said: str) -> str:
    """Return the last line about CUDA in TensorFlow's log, without the time and place before it."""
    last = ""
    for line in said.splitlines():
        if any(word in line.lower() for word in _WORDS_OF_CUDA):
            last = line
    return last.partition("] ")[2] or last or "TensorFlow does not say why"


# --- memory and disk -------------------------------------------------------------------------------------------------


def check_machine(folder: Path, memory: int, free: Mapping[Path, int]) -> Section:
    """Check that memory and disk suffice for a run started in `folder`.

    Args:
      memory, free: free bytes of memory, and of the disk of each folder.
    """
    rows = [("memory", f"{format_bytes(memory)} free")]
    problems = []
    if memory < FEW_BYTES:
        what = f"only {format_bytes(memory)} of memory is free; a task needs about 1 GB, plus its data"
        problems.append(Problem(what, "end other processes, or give this machine or container more memory"))
    for path, size in free.items():
        rows.append((f"disk of {path}", f"{format_bytes(size)} free"))
        if size < LITTLE_DISK:
            what = f"only {format_bytes(size)} of disk space is free at {path}"
            problems.append(Problem(what, "delete files, or choose another model_dir", is_fatal=size < NO_DISK))
    if not os.access(folder, os.W_OK):
        what = f"{folder} is not writable, but a run creates outputs/ and mlflow.db there"
        problems.append(Problem(what, "start in another folder, or set model_dir and tracking.uri", is_fatal=True))
    return Section("machine", rows, problems)


# --- tracking --------------------------------------------------------------------------------------------------------


def check_tracking(settings: TrackingConfig, env: Mapping[str, str], folder: Path) -> Section:
    """Check that runs started in `folder` can be recorded. MLflow is asked; csv and a user's class are only named."""
    names = [backend.name for backend in settings.backends]
    rows = [("tracking.backend", ", ".join(names) or "none")]
    if not settings.has_mlflow:
        return Section("tracking", rows)
    experiment = experiment_name(settings, env)
    tracker = MlflowTracker(tracking_uri(settings, env, folder), experiment)
    problems = []
    shown = str(masked_value("tracking.uri", tracker.uri))
    try:
        answer = tracker.check()
    except Exception as error:  # of MLflow, of a database, of the network
        answer = "no"
        do = "training continues meanwhile, and is recorded later; or choose tracking=csv or tracking.uri=..."
        problems.append(Problem(f"runs cannot be recorded in {shown}: {describe(error)}", do))
    rows += [("runs go to", shown), ("experiment", experiment), ("reachable", answer)]
    return Section("tracking", rows, problems)
