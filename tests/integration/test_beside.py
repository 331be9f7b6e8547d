"""TensorFlow Transform and ONNX with our exports: the pages about them run as they stand.

`make test-world` builds `.venv-beside`, which has them; without that these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.docs.test_tutorials import follow, ran

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-beside" / "bin"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
pytestmark = [
    pytest.mark.world,
    pytest.mark.skipif(not (BIN.parent / ".installed").exists(), reason="no .venv-beside: make beside"),
]

ESTIMATES = """
import json
import tensorflow as tf
import raw_input
import trainer

def of(input_fn, file):
    return lambda: input_fn([file], "transform", epochs=1)

islands = trainer.tft.TFTransformOutput("transform").num_buckets_for_transformed_feature("island")
estimator = tf.estimator.Estimator(trainer.model_fn, "model_run", params={"islands": islands})
exporter = tf.estimator.FinalExporter("name", lambda: trainer.serving_receiver_fn("transform"))
other = tf.estimator.Estimator(trainer.model_fn, "other", params={"islands": islands})
raw = of(raw_input.raw_input_fn, "eval.tfrecord")
train = tf.estimator.TrainSpec(of(raw_input.raw_input_fn, "train.tfrecord"), max_steps=5)
tf.estimator.train_and_evaluate(other, train, tf.estimator.EvalSpec(raw, steps=None, exporters=[exporter]))
print(json.dumps({
    "transformed": estimator.evaluate(of(trainer.input_fn, "eval.tfrecord.gz"))["average_loss"],
    "raw": estimator.evaluate(raw)["average_loss"],
    "predictions": [float(one["predictions"][0]) for one in estimator.predict(raw)],
}))
"""


def run(folder: Path, *arguments: str) -> str:
    return ran([str(BIN / "python"), *arguments], folder, ENV)


@pytest.mark.timeout(1800)
def test_a_trainer_of_tfx_trains_and_exports_with_the_transform_graph(tmp_path: Path) -> None:
    """The transform graph in the form of TensorFlow 2, and in that of TensorFlow 1."""
    (tmp_path / "estimates.py").write_text(ESTIMATES)
    for form in ("v2", "v1"):
        if form == "v2":
            follow("../how_to/tfx", tmp_path, BIN, ENV)
        else:
            for folder in ("transform", "model", "model_run", "other"):
                shutil.rmtree(tmp_path / folder)
            run(tmp_path, "transform.py", "--v1")
            assert "[1.0, 2.0]" in run(tmp_path, "run.py")
        found = json.loads(run(tmp_path, "estimates.py").splitlines()[-1])
        np.testing.assert_allclose(found["raw"], found["transformed"], rtol=1e-4, atol=1e-9)
        (export,) = (tmp_path / "other" / "export" / "name").iterdir()  # TFX takes the only file of a folder
        assert [path.name for path in export.parents[1].iterdir()] == ["name"]

        (tmp_path / "transform" / "transform_fn" / "assets" / "islands").unlink()  # the export has its own
        served = tf.saved_model.load(str(tmp_path / "model")).signatures["predict"]
        examples = tf.stack([*tf.data.TFRecordDataset(str(tmp_path / "eval.tfrecord"))])
        answers = np.sort(served(examples)["predictions"][:, 0])  # the order of the input is a shuffled one
        np.testing.assert_allclose(answers, np.sort(found["predictions"]), rtol=1e-5, atol=1e-6)
        assert np.ptp(found["predictions"]) > 1


def test_a_model_converted_to_onnx_answers_as_the_export_does(tmp_path: Path) -> None:
    follow("../how_to/convert", tmp_path, BIN, ENV)
    x = np.linspace(-2, 2, 9, dtype="float32")[:, None]
    ask = f"import numpy, onnxruntime; x = numpy.array({x.tolist()}, 'float32')\n"
    ask += "print(onnxruntime.InferenceSession('line.onnx').run(['y'], {'x': x})[0].tolist())"
    y = json.loads(run(tmp_path, "-c", ask).splitlines()[-1])
    served = tf.saved_model.load(str(tmp_path / "saved_model")).signatures["serving_default"]
    # The answer at 0 is what is left of terms of about 1, whose last bits ONNX Runtime may add in another order.
    np.testing.assert_allclose(y, served(x=tf.constant(x))["y"], rtol=1e-5, atol=1e-6)
