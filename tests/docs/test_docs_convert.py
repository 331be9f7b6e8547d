"""docs/how_to/convert.md tells the truth: its programs for TFLite run here.

Those for ONNX run in tests/integration/test_beside.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from runner import Estimator, RunConfig
from runner.export.receivers import receiver_fn_of_spec
from tests.docs.test_tutorials import blocks
from tests.support.export_models import predicted
from tests.support.models import STYLES, data, train_input
from tests.support.tiers import slow_but

PROGRAMS = {title: text for _, title, text in blocks("../how_to/convert") if title}
SHOWN = [text for language, _, text in blocks("../how_to/convert") if language == "text"]
pytestmark = pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated:UserWarning")


def test_the_programs_for_tflite_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("exported.py", "lite.py"):
        exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "docs_convert"})
    assert capsys.readouterr().out.endswith(SHOWN[0])


@pytest.mark.parametrize("style", slow_but(STYLES, "native"))
def test_a_model_converted_to_tflite_predicts_the_same(style: str, tmp_path: Path) -> None:
    x = data(7)[0]
    estimator = Estimator(STYLES[style], tmp_path, RunConfig(tensorboard=False)).train(train_input(10), steps=3)
    path = estimator.export_saved_model(tmp_path / "export", receiver_fn_of_spec(tf.TensorSpec([None, 4]))).decode()
    converter = tf.lite.TFLiteConverter.from_saved_model(path, signature_keys=["serving_default"])
    answer = tf.lite.Interpreter(model_content=converter.convert()).get_signature_runner("serving_default")(input=x)
    (name,) = set(answer) & {"y", "output"}
    wanted = predicted(estimator, lambda: tf.data.Dataset.from_tensors(x), None if style == "keras_model" else "y")
    np.testing.assert_allclose(answer[name], wanted, rtol=1e-5, atol=1e-6)
