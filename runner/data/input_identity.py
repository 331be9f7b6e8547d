"""The identity of a training input, by which a resumed run knows that it is the one of the checkpoint."""

from __future__ import annotations

import functools
import re
import types
import zlib
from typing import Any

from runner.data.inputs import InputPipeline
from runner.types import plain_params


def source_of(pipeline: InputPipeline) -> str:
    """Return a text that identifies a training input across processes: `<module>.<function> <settings> [<code>]`.

    `<settings>` is a digest of the function's bound arguments, the fields of `Input` and the element spec. It is a
    digest because params may be too long or too private for a checkpoint. A module-level function is identified by its
    name alone, so that its code may change. Lambdas and local functions share names, so they have a digest of their
    code, too.
    """
    input_fn = pipeline.input
    settings = [plain_params(getattr(input_fn, "params", None))]
    settings += [getattr(input_fn, name, None) for name in ("batch_size", "shuffle_seed")]
    if getattr(input_fn, "first_batch_only", False):
        settings.append("first_batch_only")
    fn = pipeline.function
    bound_arguments = ""
    while isinstance(fn, functools.partial):
        keywords = {name: _identify_argument(value) for name, value in fn.keywords.items()}
        arguments = tuple(map(_identify_argument, fn.args))
        bound_arguments += repr((arguments, keywords))
        fn = fn.func
    details = repr((bound_arguments, *settings, pipeline.element_spec))
    details = _ADDRESS.sub("", details)  # an address differs in each process
    name, *code = _name_and_code(fn)
    return " ".join([name, _digest(details), *code])


def _name_and_code(fn: Any) -> list[str]:
    """Return [qualified name] of a function, and for a lambda or local function also a digest of its code."""
    module = getattr(fn, "__module__", "")
    qualname = getattr(fn, "__qualname__", type(fn).__name__)
    name = f"{module}.{qualname}"
    code = getattr(fn, "__code__", None)
    if code is None or "<" not in name:
        return [name]
    return [name, _digest(_describe(code))]


def _identify_argument(value: Any) -> Any:
    """Return a bound argument. For a lambda or local function, return [name, digest of its code] instead."""
    name_and_code = _name_and_code(value)
    has_code = len(name_and_code) > 1
    if has_code:
        return name_and_code
    return value


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _digest(text: str) -> str:
    # Not Python's `hash`, which differs in each process.
    return f"{zlib.crc32(text.encode()):08x}"


def _describe(constant: Any) -> str:
    """Return a text for a code object or one of its constants. It is the same in all processes with the same version of
    Python.
    """
    if isinstance(constant, types.CodeType):
        inner = ", ".join(map(_describe, constant.co_consts))
        return f"code({constant.co_code.hex()}, {constant.co_names}, {inner})"
    if isinstance(constant, tuple):
        parts = ", ".join(map(_describe, constant))
        return f"({parts})"
    if isinstance(constant, frozenset):  # its order depends on the hash seed
        parts = ", ".join(sorted(map(_describe, constant)))
        return f"{{{parts}}}"
    return repr(constant)
