"""Checkpoints: write, verify, keep and restore a step on disk.

`writer` writes the files of a step and `reader` opens them. `layout` knows their names and how they are published.
`manifest` holds their checksums and `integrity` checks them, so that a damaged checkpoint is replaced by the one before
it. `async_saver` writes from a `snapshot` while training continues. `retention` deletes checkpoints that are not to be
kept. `input_position` identifies an input, finds its next example, and decides whether its state is saved. `warm_start`
reads values from another model's checkpoint. `manifest` and `layout` do not import TensorFlow.
"""
