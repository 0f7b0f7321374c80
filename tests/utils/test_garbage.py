"""The garbage collector is paused while a program loads, and has nothing to do when it exits."""

import gc
import subprocess
import sys

import pytest

from agenttrain.utils.garbage import no_garbage_collection


@pytest.mark.slow
def test_nothing_is_collected_in_the_block_and_its_objects_are_old_afterwards():
    with no_garbage_collection():
        assert not gc.isenabled()
        with no_garbage_collection():
            pass
        assert not gc.isenabled()  # the inner block has not switched it on
        made = [[] for _ in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    oldest = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in oldest for each in made)


def test_an_error_switches_the_collector_on_again():
    with pytest.raises(ValueError), no_garbage_collection():
        raise ValueError
    assert gc.isenabled()


def test_a_heap_that_its_owner_has_frozen_stays_frozen():
    gc.freeze()
    try:
        with no_garbage_collection():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_objects_that_are_alive_at_the_exit_are_not_collected_but_finalizers_run():
    program = """
import weakref
from agenttrain.utils.garbage import exit_without_collection

class Node:
    def __del__(self):
        print("collected")

exit_without_collection()
node = Node()
node.itself = node
del node  # a cycle: only the collector could free it
other = type("Other", (), {})()
weakref.finalize(other, print, "finalized")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["finalized"]
