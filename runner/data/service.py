"""`input.train.service`: a tf.data service computes the training input in other processes."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
import uuid

import tensorflow as tf

from runner.distribute.collectives import Collectives

_log = logging.getLogger(__name__)

ANSWER_SECS = 30.0
"""How long to wait for a dispatcher, which may start together with the run. TensorFlow's client would wait forever."""


@dataclasses.dataclass(frozen=True)
class DataService:
    """A tf.data service and how it computes an input.

    Attributes:
      address: the dispatcher's address: grpc://host:port.
      processing_mode: that of `tf.data.experimental.service.distribute`.
      job_name: runs with the same job name share the elements; None: only the workers of this run share them.
    """

    address: str
    processing_mode: str = "distributed_epoch"
    job_name: str | None = None

    def distribute(self, dataset: tf.data.Dataset, collectives: Collectives) -> tf.data.Dataset:
        """Return a dataset whose elements the service computes like those of `dataset`. All workers call this together
        and share the elements.

        Raises:
          ValueError: the dispatcher does not answer.
        """
        service = tf.data.experimental.service
        if collectives.is_chief:
            self._wait_for_dispatcher()
            _log.warning(
                "input.train.service: batches from %s arrive in no fixed order. A resumed run skips as many batches as "
                "were read before, but these may be other batches.", self.address,
            )  # fmt: skip
        job = self.job_name
        if collectives.num_workers == 1:
            return dataset.apply(service.distribute(self.processing_mode, self.address, job))
        # The workers' graphs may differ in resource names, so all of them read the chief's dataset, in one job.
        ours = ""
        if collectives.is_chief:
            dataset_id = service.register_dataset(self.address, dataset).numpy().decode()
            ours = f"{dataset_id} {job or uuid.uuid4().hex}"
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
                        f"input.train.service.address={self.address}: no dispatcher answered within {ANSWER_SECS:.0f} "
                        f"s ({error}). Start one (tf.data.experimental.service.DispatchServer), or unset the key to "
                        "compute the input in the run itself."
                    ) from error
                time.sleep(0.2)
