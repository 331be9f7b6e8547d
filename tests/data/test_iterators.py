"""Iterators: the deletion of one takes place beside whoever deletes it."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import tensorflow as tf

from runner.data.iterators import OpenIterators, handle_of, iterate

ROOT = Path(__file__).parents[2]


def test_gives_the_elements_of_the_dataset() -> None:
    assert [int(element) for element in iterate(tf.data.Dataset.range(3))] == [0, 1, 2]


def test_is_deleted_in_another_thread_when_nobody_has_it_any_more() -> None:
    deleted: list[str] = []
    done = threading.Event()

    def note(reference: object) -> None:
        deleted.append(threading.current_thread().name)
        done.set()

    iterator = iterate(tf.data.Dataset.range(3).repeat())
    next(iterator)
    reference = weakref.ref(handle_of(iterator), note)
    another = iterator
    del iterator
    assert reference() is not None and not deleted
    del another
    assert done.wait(60) and deleted == ["iterator-end"]


def test_a_process_that_ends_between_the_making_and_the_start_of_such_a_thread_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    iterators, start, ended = OpenIterators(), threading.Thread.start, []

    def end_before(thread: threading.Thread) -> None:
        ended.append(iterators.have_ended())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", end_before)
    iterator = iterators.iterate(tf.data.Dataset.range(3).repeat())
    reference = weakref.ref(handle_of(iterator))
    del iterator
    assert ended == [True] and iterators.have_ended() and reference() is not None


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_still_has_some_ends() -> None:
    code = (
        "import tensorflow as tf\n"
        "from runner.data.iterators import iterate\n"
        "kept = [iterate(tf.data.Dataset.range(3).repeat()) for _ in range(3)]\n"
        "print([int(next(iterator)) for iterator in kept])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "[0, 0, 0]\n"), ended.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_ends_while_iterators_are_deleted_is_not_aborted() -> None:
    """Some are deleted just before its end, others are still held by it, some are in a cycle."""
    code = (
        "import tensorflow as tf\n"
        "from runner.data.iterators import iterate\n"
        "data = tf.data.Dataset.range(9).repeat().map(lambda x: x + 1, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)\n"
        "def some(): return [next(one) and one for one in map(iterate, [data] * 10)]\n"
        "kept, dropped, cycle = some(), some(), some()\n"
        "cycle.append(cycle)\n"
        "del dropped, cycle\n"
        "raise SystemExit(7)\n"
    )
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        _, said = process.communicate(timeout=240)  # a minute beside ten other busy processes
        assert process.returncode == 7, said
