"""The record of a run, during training and after its end.

A task writes `journal` lines to a file, and whoever starts a run how it began and ended. `ship` sends them to a
tracker such as MLflow (`mlflow_tracker`), exactly once and in order, in a process that `shipping` starts and ends;
training never waits for it. `tensorboard` writes event files, `curves` draws pictures of runs and sweeps.
`summary` has the outcome of a run and says what is in summary.json, and `run_end`
writes how a run ended and reads it. `workers` tells how the workers of a run differ. `run_record` has run.json, and
remembers what has been shipped. `run_lock` allows one run at a time in a model_dir. `plain_values` converts a model's
values to text, and `artifacts` keeps files of the user's code.
"""
