"""The files of a checkpoint, as any process knows them: names, sizes and checksums, without TensorFlow.

`layout` defines the names, lists them, moves the files of a finished checkpoint into model_dir, and reads and writes
the state file. `manifest` holds sizes and checksums, and says what is missing or has changed. What is in the tensors is
for `runner.checkpoint`; what the supervisor and the mirror of an object store need to know is here.
"""
