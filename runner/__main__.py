"""`python -m runner`."""

from __future__ import annotations

from runner.launch.app import main

if __name__ == "__main__":
    main()
