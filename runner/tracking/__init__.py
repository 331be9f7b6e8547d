"""The record of a run, during training and after its end.

A task writes `journal` lines to a file. The supervisor's `shipper` sends them to MLflow (`mlflow_tracker`), exactly
once and in order, and training never waits for it. `tensorboard` writes event files, `curves` the pictures.
`exit_codes` has the codes and statuses with which a run ends, `summary` writes summary.json. `run_record` (run.json)
remembers how far shipping is, `run_lock` limits a model_dir to one run, `training_status` notes how training ended.
`plain_values` converts a model's values to text, `artifacts` keeps the files of the user's code.
"""
