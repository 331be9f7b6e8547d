"""The names that the variables of one trace get, on whatever replica and in whatever scope they are asked for."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class RequestedNames:
    """Names for one trace.

    Replica r's k-th request is replica 0's k-th: scopes are entered differently on other replicas ("replica_1/").

    Args:
      known: by name, what earlier traces asked for.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self._used: set[str] = set()
        self._streams: dict[Any, list[str]] = {}

    def name(self, requested: str, *, unique: bool) -> str:
        """The variable's name; `unique` says it is one already (Keras paths), not to be resolved in the scope."""
        context = tf.distribute.get_replica_context()
        stream_id = "cross-replica" if context is None else threading.get_ident()
        stream = self._streams.setdefault(stream_id, [])
        first = next((s for key, s in self._streams.items() if key != "cross-replica"), stream)
        if context is not None and stream is not first and len(stream) < len(first):
            name = first[len(stream)]
        else:
            name = self._new_name(requested, unique=unique, cross_replica=context is None)
        stream.append(name)
        return name

    def _new_name(self, requested: str, *, unique: bool, cross_replica: bool) -> str:
        if not unique:
            with tf.name_scope(requested) as scope:  # a v1 graph makes names unique here, against every op
                requested = scope.rstrip("/")
        requested = re.sub(r"(^|/)replica_\d+(?=/)", "", requested).strip("/")
        name, number = requested, 0
        while name in self._used:
            number += 1
            name = f"{requested}_{number}"
        self._used.add(name)
        if cross_replica and name not in self._known:
            # merge_call enters the variable scope a second time: 'unet/unet/beta1_power'.
            name = re.sub(r"^(.+/)\1", r"\1", name)
        return name
