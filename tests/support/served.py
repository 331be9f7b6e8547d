"""A process that serves exported models with TensorFlow alone: `python -I tests/support/served.py < cases.json`.

It answers as TensorFlow Serving does: a graph is loaded into a session by its tag, and the inputs of a request are fed
by their names in the SignatureDef. Each case is answered by `tf.saved_model.load`, too, and by `saved_model_cli show`.
"""

import base64
import contextlib
import io
import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


def session_answer(case, inputs):
    with tf.Graph().as_default(), v1.Session() as session:
        loaded = v1.saved_model.load(session, ["serve"], case["path"])
        signature = loaded.signature_def[case["signature"]]
        feeds = {signature.inputs[name].name: value for name, value in inputs.items()}
        values = session.run({name: info.name for name, info in signature.outputs.items()}, feeds)
        operations = sorted({one.type for one in session.graph.get_operations()})
        facts = {"method": signature.method_name, "variables": [one.op.name for one in v1.global_variables()]}
        return values, {**facts, "operations": operations}


def eager_answer(case, inputs):
    loaded = tf.saved_model.load(case["path"], tags=["serve"])
    outputs = loaded.signatures[case["signature"]](**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


def inputs_of(case):
    """Of a request of TensorFlow Serving, or as they are given."""
    if "predict" in case:
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest.FromString(base64.b64decode(case["predict"]))
        assert request.model_spec.signature_name == case["signature"]
        return {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
    if "classify" in case:
        from tensorflow_serving.apis import classification_pb2

        request = classification_pb2.ClassificationRequest.FromString(base64.b64decode(case["classify"]))
        return {"inputs": [one.SerializeToString() for one in request.input.example_list.examples]}
    return {
        name: [base64.b64decode(one) for one in value] if kind == "bytes" else np.array(value, kind)
        for name, (value, kind) in case["inputs"].items()
    }


def shown(path):
    """What saved_model_cli prints of a model."""
    from tensorflow.python.tools import saved_model_cli

    sys.argv = ["saved_model_cli", "show", "--dir", path, "--tag_set", "serve", "--signature_def", "serving_default"]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        saved_model_cli.main()
    return output.getvalue()


def plain(values):
    return {name: np.asarray(value).astype(str if value.dtype == object else value.dtype).tolist()
            for name, value in values.items()}  # fmt: skip


answers = []
for one in json.load(sys.stdin):
    sys.path += one.get("sys_path", [])
    fed = inputs_of(one)
    answered, found = session_answer(one, fed)
    again = eager_answer(one, fed)
    same = all(np.array_equal(again[name], answered[name]) for name in answered)
    answers.append({**found, "outputs": plain(answered), "same": same, "shown": shown(one["path"])})
assert "runner" not in sys.modules
print(json.dumps(answers))
