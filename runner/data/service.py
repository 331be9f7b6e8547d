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
    job_name = service.job_name
    if collectives.is_chief:
        _wait_for_dispatcher(str(address))
        _log.warning(
            "input.train.service: batches from %s arrive in no fixed order. A resumed run skips as many batches as "
            "were read before, but these may be other batches.", address,
        )  # fmt: skip
    client = tf.data.experimental.service
    if collectives.num_workers == 1:
        return dataset.apply(client.distribute(service.processing_mode, address, job_name))
    # The workers' graphs may differ in resource names, so all of them read the chief's dataset, in one job. The chief
    # sends the ID of the dataset and the name of the job as one text.
    chiefs_text = ""
    if collectives.is_chief:
        dataset_id = client.register_dataset(address, dataset).numpy().decode()
        chiefs_text = f"{dataset_id} {job_name or uuid.uuid4().hex}"
    dataset_id, _, job_name = collectives.broadcast_text(chiefs_text).partition(" ")
    return client.from_dataset_id(service.processing_mode, address, dataset_id, dataset.element_spec, job_name)


def _wait_for_dispatcher(address: str) -> None:
    """Wait until a dispatcher answers at `address`, host and port after an optional protocol.

    Raises:
      ValueError: none answers within ANSWER_SECS.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    deadline = time.monotonic() + ANSWER_SECS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECS).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"input.train.service.address={address}: no dispatcher answered within {ANSWER_SECS:.0f} "
                    f"s ({error}). Start one (tf.data.experimental.service.DispatchServer), or unset the key to "
                    "compute the input in the run itself."
                ) from error
            time.sleep(0.2)
