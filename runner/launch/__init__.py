"""The command line, and the processes around the tasks of a run. Nothing here imports TensorFlow.

`app` is `python -m runner`, and `api` is the same for Python: Hydra composes the config, and a run or a sweep
(`sweeps/`) starts; `command` is what its jobs share.
`supervisor` is responsible for a run: its lock, record, status and exit code. `start_files` has the
files that a start writes, and puts them back if it fails before its first step.
`task_group` starts the tasks of a run as a `gang`, which ends as a whole. `task_starter` starts a task, or forks it
from a server that has imported TensorFlow. `restarts` limits how often a run is restarted. In a cluster whose tasks
were started from outside, each task has a supervisor; `rendezvous` synchronizes them, and `worker_supervisor` is that
of a task other than the chief. `stop_requests` passes on Ctrl-C and SIGTERM. `environment/` has the commands that need
no run.
"""
