"""The model functions of `model=linear`, `model=dnn` and `model=wide_deep`, which a config describes in full.

`tabular` has the functions, made from tf.estimator's premade models in `runner/classic/premade/`. `column_specs` makes
feature columns of `model.params.columns`.
"""
