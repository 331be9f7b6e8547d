"""command=doctor: report whether a run can start here, what it would use, and how to solve each problem.

Each check returns a `Section`: rows to print and the problems that it found. The machine, the environment and the
TensorFlow probe are arguments of the checks, so that tests can choose them.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import runner
from runner.config.hydra import conf_path
from runner.config.schema import Config, ConfigError
from runner.distribute.cluster_resolver import detect
from runner.system import resources
from runner.system.child_process import describe_exit
from runner.system.console import counted, format_bytes, print_table
from runner.system.redaction import masked_value
from runner.system.start_status import START_STATUS, shows_live
from runner.tracking.mlflow_tracker import sqlite_path, tracking_uri

PROBE_SECS = 180
"""Seconds that TensorFlow's import and test may take: a minute on a slow disk without cached bytecode."""

ANSWER_SECS = 5
"""Seconds that a tracking server may take to answer."""

FEW_BYTES = 2 * 2**30
"""Bytes of free memory below which there is a warning. A task of a small model takes about 0.7 GB (measured)."""

LITTLE_DISK, NO_DISK = 2**30, 50 * 2**20
"""Free bytes of disk below which checkpoints may not fit, and below which a run cannot start."""

VARIABLES: Mapping[str, str] = {
    "TF_CONFIG": "the place of this process in a cluster",
    "CUDA_VISIBLE_DEVICES": "the GPUs that TensorFlow may see",
    "TF_FORCE_GPU_ALLOW_GROWTH": "overrides run.memory_growth",
    "TF_GPU_ALLOCATOR": "how TensorFlow allocates GPU memory",
    "TF_USE_LEGACY_KERAS": "whether tf.keras is Keras 2, if model.keras=auto finds no reason in the source",
    "KERAS_BACKEND": "the framework with which Keras 3 computes",
    "XLA_FLAGS": "settings of XLA (train.jit)",
    "TF_XLA_FLAGS": "whether TensorFlow compiles with XLA without train.jit",
    "TF_ENABLE_ONEDNN_OPTS": "whether TensorFlow uses oneDNN's kernels, which round differently",
    "OMP_NUM_THREADS": "number of threads of NumPy and oneDNN",
    "TF_CPP_MIN_LOG_LEVEL": "the lowest level of messages that TensorFlow's C++ code logs",
    "MLFLOW_TRACKING_URI": "where runs are recorded, unless tracking.uri is set",
    "MLFLOW_EXPERIMENT_NAME": "the experiment in MLflow, unless tracking.experiment is set",
    "HYDRA_FULL_ERROR": "1: mistakes show their traceback",
    "PYTHONDONTWRITEBYTECODE": "set: Python does not save compiled bytecode",
    "PYTHONPATH": "folders in which Python looks for modules first",
}
"""Environment variables that change how a run behaves -> their effect."""


@dataclass(frozen=True)
class Problem:
    """A problem of this machine or environment.

    Attributes:
      is_fatal: no run can start; False: runs start, but are slower or lack something.
    """

    what: str
    do: str
    is_fatal: bool = False


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


def show(
    config: Config, env: Mapping[str, str], sources: Sequence[tuple[str, str]], stream: IO[str] | None = None
) -> bool:
    """Print the findings, then the problems, and report whether a run can start here.

    Args:
      sources: (who names it, path) of each place in which Hydra looks for config files.
    """
    stream = stream or sys.stdout
    checks: Sequence[Callable[[], Section]] = (
        lambda: check_python(),
        lambda: check_tensorflow(_run_probe_shown(env), env),
        lambda: check_machine(Path.cwd()),
        lambda: check_tracking(config, env, Path.cwd()),
        lambda: check_config(sources),
        lambda: check_variables(config, env),
    )
    problems: list[Problem] = []
    for check in checks:  # printed one by one, so that the user sees progress
        section = check()
        print_table(section.title, ["", ""], [list(row) for row in section.rows], stream)
        print(file=stream, flush=True)
        problems += section.problems
    problems.sort(key=lambda problem: not problem.is_fatal)
    if problems:
        rows = [["error" if one.is_fatal else "warning", one.what, one.do] for one in problems]
        print_table("problems", ["", "what is wrong", "what to do"], rows, stream)
        print(file=stream)
    is_fit = not any(problem.is_fatal for problem in problems)
    print(
        "A run can start here." if is_fit else "No run can start here: see the errors above.", file=stream, flush=True
    )
    return is_fit


# --- Python and packages ---------------------------------------------------------------------------------------------


def check_python(requirements: Sequence[str] | None = None) -> Section:
    """Check that Python and the dependencies have supported versions.

    Args:
      requirements: the dependencies; None: those of the installed distribution.
    """
    try:
        about = metadata.metadata("tf-runner")
        supported, listed = about["Requires-Python"] or "", metadata.requires("tf-runner") or []
    except metadata.PackageNotFoundError:  # a checkout on the path that is not installed
        supported, listed = "", []
    rows = [
        ("runner", f"{runner.__version__} in {Path(runner.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
    ]
    problems = []
    if supported and not SpecifierSet(supported).contains(platform.python_version(), prereleases=True):
        problems.append(
            Problem(
                f"Python {platform.python_version()} is not supported ({supported})",
                "make an environment with a supported Python: python3.12 -m venv .venv",
                is_fatal=True,
            )
        )
    for text in listed if requirements is None else requirements:
        needed = Requirement(text)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = Version(metadata.version(needed.name))
        except metadata.PackageNotFoundError:
            problems.append(Problem(f"{needed.name} is not installed", f"pip install '{needed}'", is_fatal=True))
            continue
        if not needed.specifier.contains(found, prereleases=True):
            # It may work, but is not tested.
            problems.append(
                Problem(f"{needed.name} {found} is installed, not {needed.specifier}", f"pip install '{needed}'")
            )
    return Section("python", rows, problems)


# --- TensorFlow ------------------------------------------------------------------------------------------------------


def run_probe(env: Mapping[str, str], timeout_secs: float = PROBE_SECS) -> Probe:
    """Run the TensorFlow probe in a separate process."""
    # Level 0, because TensorFlow logs the reason for a missing GPU as INFO.
    given = {**env, "TF_CPP_MIN_LOG_LEVEL": "0"}
    command = [sys.executable, "-m", "runner.task.tensorflow_probe"]
    try:
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=timeout_secs, check=False)
    except subprocess.TimeoutExpired:
        return Probe(None, f"has not finished within {timeout_secs:.0f} s")
    if done.returncode:
        return Probe(None, describe_exit(done.returncode), done.stderr)
    return Probe(json.loads(done.stdout.splitlines()[-1]), said=done.stderr)


def _run_probe_shown(env: Mapping[str, str]) -> Probe:
    """Run the probe, which takes seconds, with a live line on a terminal."""
    if shows_live("auto", sys.stderr):
        START_STATUS.show("importing TensorFlow")
    try:
        return run_probe(env)
    finally:
        START_STATUS.stop()


def check_tensorflow(probe: Probe, env: Mapping[str, str], dev: Path = Path("/dev")) -> Section:
    """Check that TensorFlow can be imported and computes on each device; report why there is no GPU.

    Args:
      dev: the folder with the system's file for each NVIDIA GPU.
    """
    title = "tensorflow"
    if probe.facts is None:
        last = next((line for line in reversed(probe.said.splitlines()) if line.strip()), "it wrote nothing")
        what = f"a process that imports TensorFlow and multiplies two matrices {probe.failure}: {last.strip()}"
        return Section(
            title, [("TensorFlow", "cannot be used")], [Problem(what, _mend_import(probe, env), is_fatal=True)]
        )
    facts = probe.facts
    build = (
        f"CUDA {facts['cuda']}, cuDNN {facts['cudnn']}" if facts["cuda"] else "ROCm" if facts["rocm"] else "CPU only"
    )
    rows = [
        ("TensorFlow", f"{facts['tensorflow']}, built for {build}; imported in {facts['import_secs']} s"),
        ("Keras", f"{facts['keras']}; tf.keras is {facts['tf_keras']}"),
    ]
    problems = []
    gpus = 0
    for device in facts["devices"]:
        gpus += device["kind"] == "GPU"
        capability = ".".join(map(str, device["compute_capability"] or ()))
        about = [device["model"], capability and f"compute capability {capability}"]
        rows.append((device["name"], ", ".join(filter(None, about)) or "computes"))
        if device["error"]:
            advice = "pip install 'tf-runner[gpu]', or hide it: CUDA_VISIBLE_DEVICES=-1"
            is_fatal = device["kind"] == "CPU"
            problems.append(Problem(f"{device['name']} does not compute: {device['error']}", advice, is_fatal))
    if not gpus:
        why, problem = _why_no_gpu(probe, env, dev)
        rows.append(("GPU", f"none: {why}"))
        problems += [problem] if problem else []
    return Section(title, rows, problems)


def _mend_import(probe: Probe, env: Mapping[str, str]) -> str:
    """Return the remedy for a TensorFlow that cannot be used."""
    if "XLA_FLAGS" in probe.said and "XLA_FLAGS" in env:
        return "unset XLA_FLAGS, or correct it"
    if env.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        return "unset KERAS_BACKEND: a model_fn needs Keras on TensorFlow"
    if "SIGILL" in probe.failure:
        return "this processor lacks instructions that TensorFlow's wheels use (AVX): use another machine"
    if "SIGKILL" in probe.failure:
        return "give this machine or container more memory"
    return "pip install --force-reinstall tf-runner, in a new environment"


def _why_no_gpu(probe: Probe, env: Mapping[str, str], dev: Path) -> tuple[str, Problem | None]:
    """Return why TensorFlow sees no GPU, and the problem if the machine has one."""
    assert probe.facts is not None
    found = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if not found and not (dev / "nvidiactl").exists():
        return "this machine has no NVIDIA GPU, or its driver is not loaded or not passed to this container", None
    shown = ", ".join(found) or "nvidiactl"
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none"):
        why = f"CUDA_VISIBLE_DEVICES={visible!r} hides them"
        do = "unset CUDA_VISIBLE_DEVICES, unless you want to train on the CPU"
        return why, Problem(f"this machine has a GPU ({shown}), but {why}", do)
    if not probe.facts["cuda"]:
        why = "this TensorFlow is built for CPUs only"
        return why, Problem(f"this machine has a GPU ({shown}), but {why}", "pip install 'tf-runner[gpu]'")
    words = ("dlopen", "cuInit", "cuda drivers", "Cannot register", "driver version", "libcu", "Skipping registering")
    lines = [line for line in probe.said.splitlines() if any(word.lower() in line.lower() for word in words)]
    said = lines[-1].partition("] ")[2] or lines[-1] if lines else "TensorFlow does not say why"
    do = "pip install 'tf-runner[gpu]'; if that does not help, check with nvidia-smi that the driver supports CUDA "
    what = f"this machine has a GPU ({shown}), but TensorFlow does not use it: {said}"
    return said, Problem(what, do + str(probe.facts["cuda"]))


# --- memory and disk -------------------------------------------------------------------------------------------------


def check_machine(
    folder: Path,
    memory: resources.Memory | None = None,
    cores: tuple[int, float | None] | None = None,
    free: Mapping[Path, int] | None = None,
) -> Section:
    """Check that memory and disk suffice for a run started in `folder`.

    Args:
      memory, cores, free: those of this machine if None; `free` has bytes by folder.
    """
    memory, (count, granted) = memory or resources.find_memory(), cores or resources.find_cores()
    if free is None:
        free = {path: resources.free_bytes(path) for path in (folder, Path(tempfile.gettempdir()))}
    limit = "" if memory.limit is None else f"; the control group allows {format_bytes(memory.limit)}"
    rows = [
        ("cores", f"{count}" + ("" if granted is None else f"; the control group allows CPU time of {granted:g}")),
        ("memory", f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}{limit}"),
    ]
    problems = []
    if memory.available < FEW_BYTES:
        what = f"only {format_bytes(memory.available)} of memory is free; a task needs about 1 GB, plus its data"
        problems.append(Problem(what, "end other processes, or give this machine or container more memory"))
    if granted is not None and granted < count:
        what = f"TensorFlow starts threads for {count} cores, but the control group allows CPU time of {granted:g}"
        threads = max(1, round(granted))
        problems.append(Problem(what, f"run.intra_op_threads={threads} run.inter_op_threads={threads}"))
    for path, size in free.items():
        rows.append(("disk", f"{format_bytes(size)} free at {path}"))
        if size < LITTLE_DISK:
            what = f"only {format_bytes(size)} of disk space is free at {path}"
            problems.append(Problem(what, "delete files, or choose another model_dir", is_fatal=size < NO_DISK))
    if not os.access(folder, os.W_OK):
        what = f"{folder} is not writable, but a run creates outputs/ and mlflow.db there"
        problems.append(Problem(what, "start in another folder, or set model_dir and tracking.uri", is_fatal=True))
    return Section("machine", rows, problems)


# --- MLflow ----------------------------------------------------------------------------------------------------------


def check_tracking(config: Config, env: Mapping[str, str], folder: Path) -> Section:
    """Check that runs started in `folder` can be recorded as the config says."""
    names = ", ".join(backend.name for backend in config.tracking.backends) or "none"
    rows = [("tracking.backend", names)]
    if not config.tracking.has_mlflow:
        return Section("tracking", rows)
    uri = tracking_uri(config.tracking, env, folder)
    origin = (
        "tracking.uri"
        if config.tracking.uri
        else "MLFLOW_TRACKING_URI"
        if env.get("MLFLOW_TRACKING_URI")
        else "default"
    )
    shown = str(masked_value("tracking.uri", uri))
    answer, problem = _reach(uri, shown)
    rows += [
        ("MLflow", metadata.version("mlflow")),
        ("runs go to", f"{shown} ({origin})"),
        ("experiment", config.tracking.experiment or env.get("MLFLOW_EXPERIMENT_NAME") or "runner"),
        ("reachable", answer),
    ]
    return Section("tracking", rows, [problem] if problem else [])


def _reach(uri: str, shown: str) -> tuple[str, Problem | None]:
    """Return whether MLflow answers at `uri`, in words, and the problem if it does not."""
    later = "Training continues meanwhile, and is recorded once it is back; or choose tracking=csv or tracking.uri=..."
    path = sqlite_path(uri)
    if path is not None:
        return _reach_sqlite(path)
    if not uri.startswith(("http://", "https://")):
        return "not tried: neither an SQLite file nor an HTTP server", None
    try:
        with urllib.request.urlopen(_health(uri), timeout=ANSWER_SECS) as answer:
            return f"yes (HTTP {answer.status})", None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            do = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            has_some = any(name in os.environ for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME"))
            problem = None if has_some else Problem(f"{shown} asks for credentials (HTTP {error.code})", do)
            return f"yes, with credentials (HTTP {error.code})", problem
        return f"HTTP {error.code}", Problem(
            f"{shown} answers HTTP {error.code} to /health, an MLflow server 200", later
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"no: {reason}", Problem(f"the tracking server {shown} does not answer: {reason}", f"start it. {later}")


def _health(uri: str) -> urllib.request.Request:
    """Return the health request to an MLflow server."""
    parts = urllib.parse.urlsplit(uri)
    user, _, host = parts.netloc.rpartition("@")
    url = urllib.parse.urlunsplit((parts.scheme, host, f"{parts.path.rstrip('/')}/health", parts.query, ""))
    # urllib treats user:password@ in a URL as part of the host.
    word = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return urllib.request.Request(url, headers={"Authorization": f"Basic {word}"} if user else {})


def _reach_sqlite(path: Path) -> tuple[str, Problem | None]:
    if not path.exists():
        there = next(one for one in path.absolute().parents if one.exists())
        if os.access(there, os.W_OK):
            return "yes: the first run creates the file", None
        do = "set tracking.uri to a file that can be created, or tracking=csv"
        return "no", Problem(f"{path} does not exist and cannot be created", do)
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=ANSWER_SECS)
        try:
            (count,) = connection.execute("SELECT count(*) FROM runs").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        do = "mlflow db upgrade, or move the file away"
        return "no", Problem(f"{path} cannot be read as a database of MLflow: {error}", do)
    if not os.access(path, os.W_OK):
        return "no: the file is read-only", Problem(
            f"{path} cannot be written", f"chmod u+w {path}, or another tracking.uri"
        )
    return f"yes: a database with {counted(count, 'run')}", None


# --- the config ------------------------------------------------------------------------------------------------------


def check_config(sources: Sequence[tuple[str, str]]) -> Section:
    """Show where config files are looked for, and which of the user's files add to or replace the runner's."""
    ours = Path(runner.__file__).parent / "conf" if conf_path().startswith("pkg://") else Path(conf_path())
    rows = []
    for provider, path in sources:
        is_ours = provider == "main"
        if provider not in ("hydra", "schema") and path:
            rows.append(("searched", f"{ours if is_ours else path.removeprefix('file://')} ({provider})"))
        folder = Path(path.removeprefix("file://"))
        if is_ours or provider in ("hydra", "schema") or not folder.is_dir():
            continue
        for file in sorted(folder.rglob("*.yaml")):
            name = file.relative_to(folder)
            takes_place = (ours / name).exists()
            rows.append(("replaces" if takes_place else "adds", str(name)))
    return Section("config, in the order in which it is searched", rows)


# --- environment variables -------------------------------------------------------------------------------------------


def check_variables(config: Config, env: Mapping[str, str]) -> Section:
    """Show environment variables that change how a run behaves, and report those with which none can start."""
    rows = [
        (name, f"{masked_value(name, _short(env[name]))}  ({meaning})")
        for name, meaning in VARIABLES.items()
        if name in env
    ]
    return Section(
        "environment variables", rows or [("", "none that affects a run is set")], list(_variable_problems(config, env))
    )


def _variable_problems(config: Config, env: Mapping[str, str]) -> Iterator[Problem]:
    try:
        detect(env, config.cluster, config.strategy)
    except ConfigError as error:
        yield Problem(str(error), "see command=cluster_info and docs/how_to/clusters.md", is_fatal=True)
    if env.get("KERAS_BACKEND", "tensorflow") != "tensorflow":
        what = f"KERAS_BACKEND={env['KERAS_BACKEND']}: a model_fn needs Keras on TensorFlow"
        yield Problem(what, "unset KERAS_BACKEND", is_fatal=True)
    if env.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true") and not _is_installed("tf-keras"):
        what = "TF_USE_LEGACY_KERAS selects Keras 2, but the package tf_keras is not installed"
        yield Problem(what, "pip install 'tf-runner[classic]', or unset TF_USE_LEGACY_KERAS", is_fatal=True)
    if env.get("PYTHONDONTWRITEBYTECODE"):
        what = "PYTHONDONTWRITEBYTECODE is set, so each start compiles all modules again: 10 s instead of 4"
        yield Problem(what, "unset PYTHONDONTWRITEBYTECODE")


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"
