"""The commands that are about no run: each answers from the config and the environment, and starts no task.

`cluster_info` tells which cluster this process would be part of, and why. `new_project` writes a first project into an
empty folder, from the files of `project_template/`. `doctor` checks what a run here would need, and says for each
problem what to do; what only TensorFlow knows it asks a process of its own, `runner.task.tensorflow_probe`.
"""
