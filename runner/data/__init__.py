"""An input_fn becomes one replica's batches.

`inputs` calls the input_fn and makes its result this process's input. `sharding` decides how several workers divide the
data (`shard: auto|files|examples|input_fn|off`) and gives input_fn its `InputContext`; `replica_batches` divides a
global batch over the replicas of a process, uneven remainders included; `dataset_adapter` takes arrays, tensors and
iterators of TF 1, too. `iterators` owns the open iterators of the process; `batch_groups` reads several batches at once
for short steps. `ps_ranges` hands ranges of batches to the workers of parameter servers. `dataset_facts` says what an
input is without reading it. `service` has a tf.data service compute the training input; `wait_timer` measures how long
steps wait for it.
"""
