"""What needs no run of its own: it answers from the config and the environment, and starts no task.

`cluster_info` shows the cluster that this process would be part of, and why. `new_project` writes a first project into
an empty folder, from the files of `project_template/`. `best_runs` ranks the runs in a folder. `gpus` finds the GPUs of
this machine. `run_code` records what a run was made of, and finds how a folder differs from that. `doctor` checks what
a run needs here, and says how to solve each problem; facts that only TensorFlow knows come from a separate process,
`runner.task.tensorflow_probe`.
"""
