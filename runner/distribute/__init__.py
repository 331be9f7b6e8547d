"""Who this process is among whom, and how processes and replicas compute together.

`cluster` is the answer (`Cluster`), `cluster_resolver` asks the detectors for it: `tf_config`, `slurm`, `kubernetes`,
`tpu`, `local_cluster`. `strategy` builds the tf.distribute.Strategy of a config. `collectives` lets the workers of a
run agree on host values (a sum, any, a broadcast); `reductions` averages gradients and metrics over replicas by the
examples that each has. `errors` tells the loss of a peer from an error of one's own.
"""
