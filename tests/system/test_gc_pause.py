"""What is imported is left out of the search for garbage; what is made afterwards is not."""

from __future__ import annotations

import gc
import weakref

from runner.system import gc_pause


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_searched_meanwhile_and_what_was_made_is_left_out_later() -> None:
    with gc_pause.not_searched():
        assert not gc.isenabled()
        made = Node()
    assert gc.isenabled()
    assert not any(one is made for one in gc.get_objects())
    gc.unfreeze()


def test_garbage_that_is_made_afterwards_is_found() -> None:
    with gc_pause.not_searched():
        pass
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None
    gc.unfreeze()


def test_a_search_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_pause.not_searched():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
