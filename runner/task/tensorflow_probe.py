"""`python -m runner.task.tensorflow_probe`: import TensorFlow, compute on each device, print the findings as JSON.

command=doctor runs it in a separate process, because TensorFlow may end its process, for instance for an unknown flag.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any


def probe() -> dict[str, Any]:
    """Return versions, build, and each device with whether it computes."""
    started = time.monotonic()
    import keras
    import tensorflow as tf

    secs = time.monotonic() - started
    build = tf.sysconfig.get_build_info()
    found: dict[str, Any] = {"import_secs": round(secs, 1)}
    found["tensorflow"] = tf.__version__
    found["keras"] = keras.__version__
    found["tf_keras"] = tf.keras.__version__  # what `tf.keras` is
    found["cuda"] = None
    found["cudnn"] = None
    if build.get("is_cuda_build"):
        found["cuda"] = build.get("cuda_version")
        found["cudnn"] = build.get("cudnn_version")
    found["rocm"] = bool(build.get("is_rocm_build"))
    found["devices"] = [_describe(device) for device in tf.config.list_physical_devices()]
    return found


def _describe(device: Any) -> dict[str, Any]:
    import tensorflow as tf

    details = tf.config.experimental.get_device_details(device)
    found = {"name": device.name.removeprefix("/physical_device:"), "kind": device.device_type, "error": None}
    found["model"] = details.get("device_name")
    found["compute_capability"] = details.get("compute_capability")
    if device.device_type == "GPU":
        tf.config.experimental.set_memory_growth(device, True)  # other processes may be using it
    return found


def compute(devices: list[dict[str, Any]]) -> None:
    """Multiply two matrices on each of `devices`; store the first line of an error in it."""
    import tensorflow as tf

    # XLA reads its flags when it compiles, and ends the process for one that it does not know.
    @tf.function(jit_compile="XLA_FLAGS" in os.environ)
    def multiply() -> tf.Tensor:
        ones = tf.ones([64, 64])
        return tf.reduce_sum(tf.linalg.matmul(ones, ones))

    for found in devices:
        try:
            with tf.device(found["name"]):
                total = float(multiply())
            if total != 64.0**3:
                found["error"] = f"the product of two 64 x 64 matrices of ones sums to {total}, not {64.0**3}"
        except Exception as error:
            found["error"] = str(error).partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    facts = probe()
    compute(facts["devices"])
    print("\n" + json.dumps(facts), flush=True)
