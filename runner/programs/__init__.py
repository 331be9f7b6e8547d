"""What runs on the devices: a traced model_fn as programs that train, evaluate and predict.

`model` is a model_fn on one strategy: its variables and its programs. `train` computes a step (gradients, then
`optimizer_step`, or the train_op as it is), `train_loop` puts it into a tf.while_loop, `gradient_accumulation` takes it
in micro-batches, `eager_train` in Python; `mixed_precision`, `learning_rate` and `ema` do what their keys say.
`evaluate` and `predict` are the programs of those commands; `program` is what all of them have in common. `ps_programs`
do the same with parameter servers. `batch_losses` gives a replica's loss its share of the global mean.
"""
