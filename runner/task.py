"""The child process of a run: `python -m runner.task <model_dir>/config.yaml`. Only here is TensorFlow imported.

What happens is noted in the journal; the exit code says how it ended: 0 finished, 1 failed, 2 the user's config or code
is wrong, 3 stopped on request with a checkpoint to resume from.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import sysconfig
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runner import parsing, report, user_code
from runner.config import Config, ConfigError
from runner.hooks import Hook, Run
from runner.journal import Journal, journal_path
from runner.launcher import end_with_parent
from runner.types import StepResult

if TYPE_CHECKING:
    from runner.build import Job

FINISHED, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 3

USER_ERRORS = (
    ValueError, TypeError, LookupError, AttributeError, NameError, ImportError, SyntaxError, FileNotFoundError,
    NotImplementedError, AssertionError,
)  # fmt: skip
"""What a mistake in a config, a model_fn or an input_fn raises; all else (TensorFlow's errors, NaN) is a failure."""


class StopRequest(Hook):
    """SIGTERM as a hook: the loop that is under way ends, a checkpoint is saved, training returns.

    Attributes:
      came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def install(self) -> None:
        """Takes over SIGTERM. After the strategy is built: TensorFlow may install a handler of its own there."""
        signal.signal(signal.SIGTERM, self._note)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self.came:
            run.interrupt("SIGTERM")

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def main(argv: list[str] | None = None) -> int:
    """Runs the config file that `argv` names. The exit code."""
    (config_file,) = sys.argv[1:] if argv is None else argv
    end_with_parent(os.environ)
    user_code.add_to_path(Path.cwd())
    config = parsing.load(Path(config_file))
    assert config.model_dir is not None
    journal = Journal(journal_path(Path(config.model_dir)))
    stop = StopRequest()
    progress = report.build_progress(config.run.progress)
    try:
        journal.event("started", pid=os.getpid(), command=config.command)
        _run(config, journal, progress, stop)
    except Exception as error:
        progress.stop()
        return _report(error, journal)
    finally:
        progress.stop()
        journal.event("ended")
        journal.close()
    return INTERRUPTED if stop.came else FINISHED


def _run(config: Config, journal: Journal, progress: report.Progress, stop: StopRequest) -> None:
    say_log(progress)
    with quiet_import(os.environ):
        import tensorflow  # noqa: F401
    from runner.build import build_job

    job = build_job(config, journal, progress, hooks=(stop,))
    replicas = job.estimator.config.num_replicas_in_sync
    journal.event("built", num_replicas=replicas)
    progress.message(_headline(config, replicas))
    stop.install()
    journal.event("result", **run_command(config.command, job))


def _headline(config: Config, replicas: int) -> str:
    """What is about to run, in one line."""
    facts = [f"{config.command} {config.model.fn}", f"strategy {config.strategy.name}"]
    facts.append(f"{replicas} replica{'' if replicas == 1 else 's'}")
    if config.command != "evaluate":
        size = config.input.train.batch_size
        facts.append(f"global batch {size}" if size else f"batches of {config.input.train.fn} per replica")
    return ", ".join(facts)


def run_command(command: str, job: Job) -> dict[str, Any]:
    """Does what `command` says. What the summary tells of it: global_step, metrics, checkpoint, steps_per_sec."""
    from runner.training import train_and_evaluate

    estimator = job.estimator
    if command == "train_and_evaluate":
        assert job.train_spec is not None
        result = train_and_evaluate(estimator, job.train_spec, job.eval_specs)
        return {
            "global_step": result.global_step,
            "metrics": flat_metrics(result.metrics),
            "checkpoint": result.checkpoint,
            "steps_per_sec": result.steps_per_sec,
            "examples": result.examples,
        }
    if command == "train":
        assert job.train_spec is not None
        estimator.train(job.train_spec.input_fn, hooks=job.train_spec.hooks, max_steps=job.train_spec.max_steps)
        checkpoint = estimator.latest_checkpoint()
        return {"global_step": _step_of(estimator), "metrics": {}, "checkpoint": checkpoint}
    metrics = {
        spec.name or "": estimator.evaluate(spec.input_fn, steps=spec.steps, hooks=spec.hooks, name=spec.name)
        for spec in job.eval_specs
    }
    return {
        "global_step": _step_of(estimator),
        "metrics": flat_metrics(metrics),
        "checkpoint": estimator.latest_checkpoint(),
    }


def flat_metrics(by_eval: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics under the names they have in the journal and in MLflow: eval/<metric>, eval_<name>/<metric>."""
    from runner.metrics import scalars

    return {
        f"eval_{name}/{metric}" if name else f"eval/{metric}": value
        for name, metrics in by_eval.items()
        for metric, value in scalars(metrics).items()
        if metric != "global_step"
    }


class _ProgressHandler(logging.Handler):
    """Log records as messages, so that they do not tear the progress line."""

    def __init__(self, progress: report.Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._progress.message(prefix + record.getMessage())


def say_log(progress: report.Progress) -> None:
    """Says what the runner logs, from INFO on."""
    logger = logging.getLogger("runner")
    logger.handlers = [_ProgressHandler(progress)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def quiet_import(env: Mapping[str, str]) -> Iterator[None]:
    """Hides what TensorFlow 2.21 writes to stderr before its log level counts; says it after all when it raises.

    Does nothing where TF_CPP_MIN_LOG_LEVEL asks for information (0 or 1).
    """
    if env.get("TF_CPP_MIN_LOG_LEVEL", "0") < "2":
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            hidden.seek(0)
            os.write(kept, hidden.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the user's own code in an error's traceback; None when there is none."""
    ours = str(Path(__file__).parent)
    installed = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, *installed, "<")) and Path(frame.filename).exists()
    ]
    return frames[-1] if frames else None


def _step_of(estimator: Any) -> int | None:
    from runner.checkpoints import checkpoint_step

    path = estimator.latest_checkpoint()
    return None if path is None else checkpoint_step(path)


def _report(error: Exception, journal: Journal) -> int:
    """Says what went wrong, to the person and to the journal. The exit code."""
    is_users = isinstance(error, USER_ERRORS)
    said = (
        str(error) if isinstance(error, ConfigError | user_code.UserCodeError) else f"{type(error).__name__}: {error}"
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)  # Keras makes parts of its messages bold
    journal.event(
        "error",
        error=textwrap.shorten(said, 300, placeholder="..."),
        traceback="".join(traceback.format_exception(error)),
    )
    lines = []
    if not is_users or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)  # ends with the message
    else:
        lines = [f"runner: {said}", *getattr(error, "__notes__", ())]
    frame = user_frame(error)
    if frame is not None:
        lines.append(f"  in {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}")
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    return USER_ERROR if is_users else FAILED


if __name__ == "__main__":
    sys.exit(main())
