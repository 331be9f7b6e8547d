"""The command: everything before, around and after the tasks of a run. It never imports TensorFlow.

`app` is `python -m runner`, and `api` the same for Python: Hydra composes the config, and a run or a sweep (`multirun`,
`sweep`, `optuna_sweeper`) starts. `supervisor` owns a run: lock, record, status, exit code; `start_files` has the files
that it writes before the first step and removes if that never comes. `task_group` starts the tasks of a run as a
`gang`, which ends as a whole; `task_starter` forks them from a server that has imported TensorFlow, if that pays off.
`restarts` limits how often a run starts again. `rendezvous` brings the supervisors of several hosts to one start, and
`worker_supervisor` is that of a host without the chief. `stop_requests` passes on Ctrl-C and SIGTERM. `environment/`
has the commands that need no run.
"""
