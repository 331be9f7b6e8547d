"""Turn an input_fn into the batches of each replica.

`inputs` calls the input_fn and builds this process's input pipeline from its result. `sharding` decides how several
workers divide the data (`shard: auto|files|examples|input_fn|off`) and passes input_fn its `InputContext`.
`replica_batches` divides a global batch over the replicas of a process, uneven remainders included. `dataset_adapter`
accepts arrays, tensors and TensorFlow 1 iterators as well as datasets. `iterators` owns the open iterators of the
process. `batch_groups` reads several batches at once for short steps. `ps_ranges` hands out ranges of batches to the
workers of a parameter server cluster. `train_input` opens the training input at the example after those of a
checkpoint: `input_identity` tells whether it is the same input, `input_state` whether the next checkpoint holds the
state of its iterator. `shared_stream` compares what several workers read of one stream. `dataset_facts` describes an
input without reading it. `service` lets a tf.data service compute the training input. `wait_timer` measures how long
steps wait for their input. `input_profile` reads an input by itself, and measures its stages and what a change gains.
"""
