"""The public Estimator, and the loops around the programs.

`estimator.Estimator` trains, evaluates, predicts and exports; its parts share a `context` and its models. A training
run starts from a `train_setup`: the model is traced and restored, and the input is at its position. `train_loop` is the
run from its first step to its last, with `train_steps` (takes them), `checkpointing` (saves), `train_log` (logs),
`nan_loss` (stops or rolls back) and `loop_boundary` (decides what all workers do next). `train_and_evaluate` alternates
training with `evaluation`, as its `specs` say, and calls the exporters. `early_stopping` may end training, and
`reduce_lr_on_plateau` may reduce its learning rate. If a separate process evaluates, `evaluator` runs there and follows
the checkpoints, and the training process acts on the results.
"""
