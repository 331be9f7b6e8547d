"""What is recorded of a run: while it trains, and when it has ended.

A task writes `journal` lines; that file is the spool. The supervisor's `shipper` sends them to MLflow
(`mlflow_tracker`), exactly once and in order, and training never waits for it. `tensorboard` writes event files,
`curves` the pictures. `exit_codes` says which code and status a run ends with and who chooses it, `summary` writes
summary.json. `run_record` (run.json) says how far the shipping is, `run_lock` keeps a model_dir to one run,
`training_status` says that training came to its end. `plain_values` makes text of what a model gives,
`artifacts` keeps the files of the user's code.
"""
