"""The programs that run on the devices: a traced model_fn that trains, evaluates or predicts.

`model` is a model_fn on one strategy, with its variables and programs. `train` computes a step (gradients and
`optimizer_step`, or the train_op). `train_loop` puts it into a tf.while_loop, `gradient_accumulation` splits it into
micro-batches, `eager_train` runs it in Python. `mixed_precision`, `learning_rate` and `ema` implement the keys of that
name. `evaluate` and `predict` are the programs of those commands; `program` is common to all. `ps_programs` run the
same with parameter servers. `batch_losses` scales a replica's loss by its share of the global mean.
"""
