"""The texts of the messages that tests meet: `messages.txt` of a package holds them, and no test repeats one.

A test says which mistake it makes and which kind of message it expects; a text that changes, changes beside its
`raise` and in that file. `make messages` writes the files anew; read their diff.

    test_warm_start.py::test_a_wrong_name_is_refused[include]
        ValueError: train.warm_start.include: 'hiden/.*' matches no variable. Did you mean 'hidden/kernel'?

A message that ends in "..." goes on with the words of another package, or with what is not the same in each run.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
ENTRY, GOES_ON = "    ", "    | "

_written: dict[Path, dict[str, list[str]]] = defaultdict(dict)


def file_of(test: Path) -> Path:
    """Return the file with the messages of the package of a test file."""
    parts = test.relative_to(TESTS).parts
    return TESTS.joinpath(*parts[:1] if len(parts) > 1 else (), "messages.txt")


def read_messages(file: Path) -> dict[str, list[str]]:
    """Return the messages of each test, in the order in which it meets them."""
    messages: dict[str, list[str]] = {}
    of_test: list[str] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith(GOES_ON.rstrip()):
            of_test[-1] += "\n" + line.removeprefix(GOES_ON.rstrip()).removeprefix(" ")
        elif line.startswith(ENTRY):
            of_test.append(line.removeprefix(ENTRY))
        elif line:
            of_test = messages.setdefault(line, [])
    return messages


class Messages:
    """The messages that one test meets, compared with those of the file one by one."""

    def __init__(self, item: Any, tmp_path: Path) -> None:
        self.file = file_of(item.path)
        self.test = f"{item.path.relative_to(self.file.parent).as_posix()}::{item.name}"
        self.expected = read_messages(self.file).get(self.test, [])
        self.met: list[str] = []
        self.is_written = bool(item.config.getoption("write_messages"))
        self._places = {str(tmp_path): "<tmp>", str(TESTS.parent): "<runner>", sys.prefix: "<python>"}

    def same(self, kind: str, text: str, *, hide: str = "") -> None:
        """Compare a message with the next one of the file; `hide`: what of it, a pattern, differs from run to run."""
        for place, name in self._places.items():
            text = text.replace(place, name)
        text = re.sub(r"(\.py:|\bline )\d+", r"\1#", text)  # a line moves with everything above it
        message = f"{kind}: {re.sub(hide, '#', text) if hide else text}".rstrip()
        number = len(self.met)
        expected = self.expected[number] if number < len(self.expected) else ""
        begins = expected.endswith("...") and message.startswith(expected.removesuffix("..."))
        self.met.append(expected if begins else message)
        if not self.is_written:
            assert self.met[-1] == expected, f"not the message of {self.test} in {self.file}"

    @contextmanager
    def raised(self, kind: type[BaseException], *, hide: str = "") -> Iterator[pytest.ExceptionInfo[Any]]:
        """Expect an error of this kind; the file has the name of its class and its text."""
        with pytest.raises(kind) as caught:
            yield caught
        self.same(type(caught.value).__name__, str(caught.value), hide=hide)

    def logged(self, caplog: pytest.LogCaptureFixture, about: str = "", *, hide: str = "") -> None:
        """Compare the warnings and errors of the log that hold `about`, a key or a name."""
        for record in caplog.records:
            if record.levelno >= logging.WARNING and about in record.getMessage():
                self.same(record.levelname, record.getMessage(), hide=hide)

    def end(self) -> None:
        """Take what the test met into the file, or see that it met all messages of the file."""
        if self.is_written:
            _written[self.file][self.test] = self.met
        else:
            assert len(self.met) >= len(self.expected), f"{self.test} has not met {self.expected[len(self.met) :]}"


def write_messages() -> None:
    """Write the files of the tests that ran anew, without tests that are gone."""
    for file, of_tests in _written.items():
        lines: list[str] = []
        for test, texts in sorted({**read_messages(file), **of_tests}.items()):
            if texts and is_there(file, test):
                lines += [test, *(ENTRY + text.replace("\n", "\n" + GOES_ON) for text in texts), ""]
        file.write_text("\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n")


def is_there(file: Path, test: str) -> bool:
    """Return whether the test file of a package has such a test."""
    name, _, function = test.partition("::")
    path = file.parent / name
    return path.exists() and f"def {function.partition('[')[0]}(" in path.read_text()
