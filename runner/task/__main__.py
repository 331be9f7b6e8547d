"""`python -m runner.task <config file>`: a task of a run, as its supervisor starts it."""

from __future__ import annotations

from runner.system.standard_streams import keep_saying
from runner.task.main import end, main

if __name__ == "__main__":
    keep_saying()
    end(main())
