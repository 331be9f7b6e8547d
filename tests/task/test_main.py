"""The task: signals, a debugger, exit codes and what is said, in this process as run.inline has it."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.system.child_process import STOP_SIGNALS
from runner.system.heartbeat import HEARTBEAT, Heartbeat, HeartbeatMonitor
from runner.task import commands, error_report, main, stop_hook
from runner.tracking.journal import NullJournal
from runner.tracking.run_end import GENERATION
from tests.support.jobs import config_file, endless, noted, results, run
from tests.support.messages import Messages
from tests.support.tiers import slow_but
from tests.support.trained import Put

INTERRUPTING = ("input.train.fn=tests.support.jobs.interrupting", "train.max_steps=100000", "train.steps_per_loop=2")


def model_dir(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir() if path.suffix != ".jsonl")


def raising(features: Any, labels: Any, mode: str, params: Any) -> Any:
    raise ValueError(f"cannot open postgres://me:{params.password}@host/db")


def debugged(features: Any, labels: Any, mode: str, params: Any) -> Any:
    from tests.support.line import line

    breakpoint()
    return line(features, labels, mode, params)


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Signals and the log are afterwards what they were."""
    logger = logging.getLogger("runner")
    before = [*map(signal.getsignal, STOP_SIGNALS)], logger.handlers, logger.propagate
    yield
    now = [*map(signal.getsignal, STOP_SIGNALS)], logger.handlers, logger.propagate
    assert now == before


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", slow_but(["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], "SIGTERM", "SIGUSR1"))
def test_a_stop_saves_and_the_next_run_goes_on(
    number: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, *INTERRUPTING, f"+input.train.params.signal={number}") == 3
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Stopping: ")]
    messages.same("line", said)
    (result,) = results(tmp_path)
    step = result["global_step"]
    assert 2 <= step <= 8 and result["checkpoint"] == f"{tmp_path}/run/model.ckpt-{step}"
    assert result["metrics"] == {}, "no evaluation follows"
    assert run(tmp_path, f"train.max_steps={step + 2}") == 0
    assert results(tmp_path)[1]["examples"] == 4


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages) -> None:
    monkeypatch.setattr(stop_hook.StopRequest, "after_step", lambda self, run, result: None)  # as if the loop were long
    twice = ("+input.train.params.signal=SIGINT", "+input.train.params.at=[5,50]", "train.steps_per_loop=1")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, *INTERRUPTING[:2], *twice)
    (error,) = [line["error"] for line in noted(tmp_path) if line.get("event") == "error"]
    messages.same("error", error)
    assert results(tmp_path) == []


def stopping(params: Any) -> Any:
    """An input function during which somebody asks to stop."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # cut short by the signal's exception
    raise AssertionError("went on")


def test_a_stop_before_the_first_step_is_heeded_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setenv(GENERATION, "1")  # a supervisor notes the end
    assert run(tmp_path, "input.train.fn=tests.task.test_main.stopping") == 1, "there is nothing to go on from"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "Stopped" in line]
    messages.same("exit 1", said)
    assert model_dir(tmp_path) == []
    assert run(tmp_path) == 0
    assert run(tmp_path, "input.train.fn=tests.task.test_main.stopping", "train.max_steps=8") == 3
    assert run(tmp_path, "train.max_steps=8") == 0
    assert [result["global_step"] for result in results(tmp_path)] == [4, 8]


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_a_pass_over_data_ends_at_once_without_a_result(
    command: str, put_trained: Put, tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    put_trained()
    before = model_dir(tmp_path)
    block = "eval" if command == "evaluate" else "predict"
    assert run(tmp_path, f"command={command}", f"input.{block}.fn=tests.support.jobs.interrupting") == 3
    for line in capfd.readouterr().err.splitlines():
        if "Stop" in line:
            messages.same("exit 3", line)
    assert model_dir(tmp_path) == before and len(results(tmp_path)) == 1
    assert [line["reason"] for line in noted(tmp_path) if line.get("event") == "interrupted"] == ["SIGTERM"]


@pytest.mark.parametrize("settings", [("checkpoint.save_steps=2",), ()], ids=["along the way", "at the end"])
def test_a_stop_during_an_evaluation_of_training_is_resumable(settings: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, "input.eval.fn=tests.support.jobs.interrupting", *settings) == 3
    (result,) = results(tmp_path)
    assert result["global_step"] == (2 if settings else 4) and result["metrics"] == {}
    assert run(tmp_path, *settings) == 0
    assert results(tmp_path)[1]["global_step"] == 4 and set(results(tmp_path)[1]["metrics"]) == {
        "eval/loss",
        "eval/mae",
    }


def test_a_stop_that_leaves_nothing_undone_is_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stop_hook.StopRequest, "after_step", lambda self, run, result: None
    )  # it came after the last step
    assert run(tmp_path, "command=train", *INTERRUPTING[:1], "+input.train.params.at=[1]") == 0


def asked_at_its_exit(params: Any) -> Any:
    """An input of a process that is asked to stop while Python ends."""
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return endless(params)


@pytest.mark.slow
@pytest.mark.processes
def test_a_stop_after_the_last_evaluation_is_a_finished_run(tmp_path: Path) -> None:
    file = config_file(tmp_path, "input.train.fn=tests.task.test_main.asked_at_its_exit")
    task = subprocess.run([sys.executable, "-m", "runner.task", str(file)], cwd=Path(__file__).parents[2], check=False)
    assert task.returncode == 0
    (result,) = results(tmp_path)
    assert result["global_step"] == 4 and "eval/loss" in result["metrics"]


# --- a debugger -----------------------------------------------------------------------------------------------------


def test_breakpoint_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: seen.append(sys._getframe(1).f_code.co_name))
    assert run(tmp_path, "model.fn=tests.task.test_main.debugged") == 0
    assert set(seen) == {"debugged"}


def test_no_live_line_gets_between_a_debugger_and_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert run(tmp_path, "run.progress=auto") == 0
    said = capsys.readouterr().err
    assert "step 4/4  loss " in said and "\x1b" not in said


# --- what is said ---------------------------------------------------------------------------------------------------


def test_says_when_it_is_ready_and_how_long_things_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "checkpoint.save_steps=2") == 0
    said = capsys.readouterr().err
    assert said.count("ready after ") == 1
    (ready,) = [line for line in said.splitlines() if line.startswith("ready after ")]
    assert re.fullmatch(r"ready after \d+\.\d s(: \w+ \d+\.\d s(, \w+ \d+\.\d s)*)?", ready)
    assert said.index(ready) < said.index("step 1/4")
    assert "Saved model.ckpt-2: " in said and "Saved model.ckpt-0" not in said
    (evaluated,) = [line for line in said.splitlines() if line.startswith("eval at step 4: ")]
    assert evaluated.endswith(" s)") and "(8 examples, " in evaluated
    assert "Input (" not in said  # how the workers divide the data is said where there are several


def test_what_took_no_time_is_left_out_of_how_long_things_took(messages: Messages) -> None:
    said: list[str] = []
    journal = SimpleNamespace(phases={"import": 4.21, "restore": 0.01, "trace": 0.3})
    context = SimpleNamespace(journal=journal, progress=SimpleNamespace(message=said.append), started=time.monotonic())
    ready = commands.Ready(cast(Any, context))
    for _ in range(2):
        ready.begin(cast(Any, None))
    assert len(said) == 1
    messages.same("line", said[0])


def test_off_says_nothing_but_warnings_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    assert run(tmp_path, "run.progress=off") == 0
    assert capsys.readouterr() == ("", "")
    assert run(tmp_path, "run.progress=off", "train.max_steps=6", "+model.params.learning_rate=1e30") == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("runner: ")]
    messages.same("exit 1", said)
    empty = ("+input.train.params.num_examples=0", "train.max_steps=8", "input.train.fn=tests.support.jobs.once")
    assert run(tmp_path, "run.progress=off", *empty) == 2
    said = capsys.readouterr().err.splitlines()[0]
    messages.same("exit 2", said)


def test_an_evaluation_without_examples_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    none = ("+input.eval.params.num_examples=0", "input.eval.fn=tests.support.jobs.once", "input.eval.batch_size=3")
    assert run(tmp_path, *none) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("runner: ")]
    messages.same("exit 2", said)


def test_a_mistake_in_model_fn_is_one_message_without_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    mistaken = ("model.fn=tests.task.test_main.raising", "+model.params.password=hunter22")
    assert run(tmp_path, *mistaken) == 2
    said = capsys.readouterr().err
    for text in said.splitlines():
        if text.startswith("runner: ") or ", in raising: " in text:
            messages.same("exit 2", text)
    (error,) = [line for line in noted(tmp_path) if line.get("event") == "error"]
    assert "hunter22" not in said + error["error"] + error["traceback"] and "***" in error["error"]
    assert "Traceback" not in said and "Traceback" in error["traceback"]


def test_a_file_that_is_no_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path)
    path.write_text(path.read_text().replace("max_steps: 4", "max_step: 4"))
    assert main.main([str(path)], inline=True) == 2
    assert "train.max_step" in capsys.readouterr().err


def test_a_syntax_error_names_its_file_and_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, messages: Messages
) -> None:
    try:
        compile("x = 1\ndef model_fn(features labels): pass\n", str(tmp_path / "net.py"), "exec")
    except SyntaxError as error:
        error_report.report_error(error, NullJournal(), {}, set())
    said = capsys.readouterr().err.splitlines()
    for text in said:
        messages.same("line", text)
    assert "SyntaxError" in said[0] and "line 2" in said[1]


def test_a_server_that_is_asked_to_stop_hands_it_on() -> None:
    """It holds what the coordinator has to save."""
    read_end, write_end = os.pipe()
    pulse = HeartbeatMonitor(read_end)
    stop = main.ForwardedStop(NullJournal(), Heartbeat({HEARTBEAT: str(write_end)}))
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert pulse.silent_secs() < 60
        assert pulse.wants_to_stop
        pulse.close()
        os.kill(os.getpid(), signal.SIGTERM)  # nobody listens any more
    finally:
        stop.uninstall()
        os.close(write_end)
