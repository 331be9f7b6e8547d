"""A process that is killed between two writes, within the process of the test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from runner.tracking.journal import Journal


class Killed(BaseException):
    """What a kill is here: nothing catches it, and nothing is written any more."""


class Cuts:
    """Counts the small files that are replaced and the lines of journals, and ends the process after one of them.

    Attributes:
      names: what was written since `cut` was called: names of files, events of journals.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._left: int | None = None
        replace, event = os.replace, Journal.event

        def replace_and_count(source: str, target: Path) -> None:
            self._check()
            replace(source, target)
            self._wrote(Path(target).name)

        def event_and_count(journal: Journal, kind: str, **fields: Any) -> None:
            self._check()
            event(journal, kind, **fields)
            self._wrote(kind)

        patch.setattr(os, "replace", replace_and_count)
        patch.setattr(Journal, "event", event_and_count)

    def cut(self, writes: int | None) -> None:
        """Kill this process after so many writes from now on; None: never."""
        self.names.clear()
        self._left = writes

    def _check(self) -> None:
        if self._left == 0:
            raise Killed

    def _wrote(self, name: str) -> None:
        self.names.append(name)
        if self._left is not None:
            self._left -= 1
            self._check()
