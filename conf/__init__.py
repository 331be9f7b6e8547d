"""The config groups; in an installed wheel this directory is the package `runner.conf`."""
