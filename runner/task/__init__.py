"""The child process of a run: from a config file to objects, and one function per command.

`main` is its life: journal, signals, the first import of TensorFlow, the exit code. `server` has done the imports and
forks tasks. `stop_hook` ends training on SIGTERM and at a preemption notice, which `preemption` watches for. `build`
turns a `Config` into the user's functions, a strategy, an Estimator and its specs. `commands` has one function per
command; `dry_run`, `profile_input`, `inspect_run` and `prediction_files` do the work of the larger ones. `error_report`
reports errors. command=doctor runs `tensorflow_probe`. `user_mlflow` makes MLflow in the user's code find the run.
"""
