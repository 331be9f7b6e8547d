"""This process's place in the cluster, and how processes and replicas compute together.

`cluster` describes the place (`Cluster`). `cluster_resolver` finds it with the detectors `tf_config`, `slurm`,
`kubernetes`, `tpu` and `local_cluster`. `strategy` builds the tf.distribute.Strategy of a config. `collectives` lets
the workers of a run agree on host values (a sum, any, a broadcast). `reductions` averages gradients and metrics over
replicas, weighted by their numbers of examples. `replica_values` knows which tensors are the same on all replicas, and
`gradient_calls` sums the gradients that model_fn uses by itself. `errors` tells the loss of a peer from a task's own
error.
"""
