"""The public Estimator, and the loops around the programs.

`estimator.Estimator` trains, evaluates, predicts and exports; its parts share a `context` and its models. A training
run starts from a `train_setup`: the model traced and restored, the input at its place. `train_loop` takes the steps,
with `checkpointing` (saves), `train_log` (logs), `nan_loss` (stops or rolls back) and `loop_boundary` (what all workers
do next). `train_and_evaluate` alternates training with `evaluation`, as its `specs` say, and calls the exporters.
`early_stopping` may end it, and `reduce_lr_on_plateau` may reduce its learning rate. With an evaluator process,
`evaluator` follows the checkpoints, and training acts on its findings.
"""
