"""What a process of a worker does between two tasks."""

import gc
import weakref

from a2lib.experiments.harness.worker import settle


def test_what_a_task_leaves_is_garbage_from_the_next_ones_end_on(request):
    request.addfinalizer(gc.unfreeze)
    left = [set()]
    left.append(left)
    seen = weakref.ref(left[0])
    settle()
    del left
    gc.collect()  # within the next task, which looks through what that has made
    assert seen() is not None
    made = [set()]
    made.append(made)
    new = weakref.ref(made[0])
    del made
    gc.collect()
    assert new() is None
    settle()
    assert seen() is None
