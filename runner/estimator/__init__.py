"""The public object, and the loops around the programs.

`estimator.Estimator` trains, evaluates, predicts and exports; its parts share a `context` and its models. A run of
training begins with a `train_setup` (traced, restored, at its place in the input). `train_loop` takes the steps:
`checkpointing` saves, `train_log` logs, `nan_loss` stops or rolls back, `loop_boundary` ends where all workers end.
`train_and_evaluate` alternates it with `evaluation`, as the `specs` say, and calls the exporters; `early_stopping`
may end it, and `reduce_lr_on_plateau` reduces its learning rate. With an evaluator process, `evaluator` follows the
checkpoints, and training heeds what it finds.
"""
