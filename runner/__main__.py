"""`python -m runner`, and the console script `runner`."""

from __future__ import annotations

import sys

from runner.config.help import answer
from runner.system.exit_codes import USER_ERROR
from runner.system.standard_streams import keep_saying, say
from runner.system.start_status import START_STATUS, is_for


def main() -> None:
    """Run the command line and exit with its code."""
    keep_saying()
    try:
        told = answer(sys.argv[1:])
    except ValueError as error:
        say(f"runner: {error}")
        sys.exit(USER_ERROR)
    if told:
        print(told)
        return
    if is_for(sys.argv[1:]):
        # Before the slow import of Hydra, so that the screen is not empty meanwhile.
        START_STATUS.show("reading the config")
    try:
        from runner.launch.app import run_command_line

        code = run_command_line()
    finally:
        START_STATUS.stop()
    sys.exit(code)


if __name__ == "__main__":
    main()
