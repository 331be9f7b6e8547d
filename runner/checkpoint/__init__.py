"""Checkpoints: write, verify, keep and restore a step on disk.

`writer` writes the files of a step and `reader` opens them; `runner.checkpoint_files` has their names and checksums.
`integrity` reads them whole, so that a run resumes from the checkpoint before a damaged one. `async_saver` writes from
a `snapshot` while training continues. `retention` deletes old checkpoints, and does not import TensorFlow.
`equal_replicas` compares the replicas before a save. `warm_start` reads values from another model's checkpoint, and
`vocabulary` matches their rows by tokens.
"""
