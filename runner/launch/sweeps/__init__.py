"""Sweeps: many runs from one command, each under its own supervisor, and what becomes of their results.

`multirun` runs the jobs that Hydra's launcher calls, several at a time if the config says so; `devices` divides the
GPUs over them. `optuna_sweeper` asks Optuna which values to try next. `sweep` is the folder of all, with the results
of the jobs. `ranking` puts them in order, and `repeats` groups runs that differ only in their seed.
"""
