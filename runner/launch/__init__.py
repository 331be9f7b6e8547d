"""The command: what happens before, around and after the tasks of a run. TensorFlow is never imported here.

`app` is `python -m runner`, and `api` the same for Python: Hydra composes, and a run or a sweep (`multirun`, `sweep`,
`optuna_sweeper`) starts. `supervisor` owns a run: its lock, its record, its status and exit code; `start_files` is what
it writes before the first step and takes away where that never comes. `task_group` starts its tasks, a `gang` that
lives and dies together; `task_starter` forks them from a server that has imported TensorFlow, where that pays.
`restarts` starts it again, `rendezvous` brings the supervisors of several hosts to one start, `worker_supervisor` is
the one of a host that is not the chief's. `stop_requests` hands Ctrl-C and SIGTERM on. `environment/` has the
commands that are about no run.
"""
