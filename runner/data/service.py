"""A tf.data service (`input.train.service`) computes an input in processes beside the run."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
import uuid
from typing import Any

import tensorflow as tf

from runner.distribute.collectives import Collectives

_log = logging.getLogger(__name__)

ANSWER_SECS = 30.0
"""A dispatcher may be started together with the run; TensorFlow's own client waits for it without an end."""


@dataclasses.dataclass(frozen=True)
class DataService:
    """A tf.data service, and how an input is computed by it.

    Attributes:
      address: of its dispatcher: grpc://host:port.
      processing_mode: as of `tf.data.experimental.service.distribute`.
      job_name: other datasets that are read under this name share the elements; None: those of this input alone.
    """

    address: str
    processing_mode: str = "distributed_epoch"
    job_name: str | None = None

    def distribute(self, dataset: tf.data.Dataset, collectives: Collectives) -> tf.data.Dataset:
        """Return `dataset` as the service computes it; workers, which call this together, share its elements.

        Raises:
          ValueError: no dispatcher answers.
        """
        service = tf.data.experimental.service
        if collectives.is_chief:
            self._wait_for_dispatcher()
            _log.warning(
                "input.train.service: the order of what %s computes is no fixed one. A run that resumes leaves out as "
                "many batches as it had read, which may be others than those.", self.address,
            )  # fmt: skip
        job = self.job_name
        if collectives.num_workers == 1:
            return dataset.apply(service.distribute(self.processing_mode, self.address, job))
        # The graphs of several workers may differ (by names of resources): all read that of the chief, in one job.
        ours = ""
        if collectives.is_chief:
            ours = f"{_text(service.register_dataset(self.address, dataset))} {job or uuid.uuid4().hex}"
        dataset_id, _, job = collectives.broadcast_text(ours).partition(" ")
        return service.from_dataset_id(self.processing_mode, self.address, dataset_id, dataset.element_spec, job)

    def _wait_for_dispatcher(self) -> None:
        host, _, port = self.address.rpartition("://")[2].rpartition(":")
        last = time.monotonic() + ANSWER_SECS
        while True:
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECS).close()
                return
            except OSError as error:
                if time.monotonic() >= last:
                    raise ValueError(
                        f"input.train.service.address={self.address}: no dispatcher answers there for "
                        f"{ANSWER_SECS:.0f} s ({error}). Start one (tf.data.experimental.service.DispatchServer), or "
                        "leave the key out: the run then computes its input itself."
                    ) from error
                time.sleep(0.2)


def _text(dataset_id: Any) -> str:
    value = dataset_id.numpy() if tf.is_tensor(dataset_id) else dataset_id
    return value.decode() if isinstance(value, bytes) else str(value)
