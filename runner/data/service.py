"""`input.train.service`: a tf.data service computes the training input in other processes."""

from __future__ import annotations

import logging
import socket
import time
import uuid

import tensorflow as tf

from runner.config.settings.data_service import DataService as DataService
from runner.distribute.collectives import Collectives

_log = logging.getLogger(__name__)

ANSWER_SECS = 30.0
"""How long to wait for a dispatcher, which may start together with the run. TensorFlow's client would wait forever."""


def distribute(service: DataService, dataset: tf.data.Dataset, collectives: Collectives) -> tf.data.Dataset:
    """Return a dataset whose elements `service` computes like those of `dataset`. All workers call this together and
    share the elements.

    Raises:
      ValueError: the dispatcher does not answer.
    """
    address = service.address
    job = service.job_name
    if collectives.is_chief:
        _wait_for_dispatcher(str(address))
        _log.warning(
            "input.train.service: batches from %s arrive in no fixed order. A resumed run skips as many batches as "
            "were read before, but these may be other batches.", address,
        )  # fmt: skip
    client = tf.data.experimental.service
    if collectives.num_workers == 1:
        return dataset.apply(client.distribute(service.processing_mode, address, job))
    # The workers' graphs may differ in resource names, so all of them read the chief's dataset, in one job.
    ours = ""
    if collectives.is_chief:
        dataset_id = client.register_dataset(address, dataset).numpy().decode()
        ours = f"{dataset_id} {job or uuid.uuid4().hex}"
    dataset_id, _, job = collectives.broadcast_text(ours).partition(" ")
    return client.from_dataset_id(service.processing_mode, address, dataset_id, dataset.element_spec, job)


def _wait_for_dispatcher(address: str) -> None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    last = time.monotonic() + ANSWER_SECS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECS).close()
            return
        except OSError as error:
            if time.monotonic() >= last:
                raise ValueError(
                    f"input.train.service.address={address}: no dispatcher answered within {ANSWER_SECS:.0f} "
                    f"s ({error}). Start one (tf.data.experimental.service.DispatchServer), or unset the key to "
                    "compute the input in the run itself."
                ) from error
            time.sleep(0.2)
