"""The child process of a run: from a config file to objects, and one function a command.

`main` is its life (journal, signals, the first import of TensorFlow, the exit code); `server` has done the imports and
forks tasks; `stop_hook` ends training on SIGTERM, and at a notice of preemption, which `preemption` watches for.
`build` makes of a `Config` the user's functions, a strategy, an Estimator and its specs; `commands` has one function a
command, `dry_run`, `inspect_run` and `prediction_files` what the larger of them do. `error_report` says what went
wrong. `tensorflow_probe` is asked by command=doctor. `user_mlflow` has MLflow of the user's code find the run.
"""
