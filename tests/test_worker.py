"""The worker: turns, cancelled jobs, failures, and nothing left behind."""

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError

import pytest
from tiny_page import PATIENCE, until

from medusa_viz.models import memory
from medusa_viz.models.worker import Worker, WorkerClosed


class Held:
    """A worker whose first job blocks until `go`, so that queues can be filled in peace. `served` lists the jobs."""

    def __init__(self):
        self.worker, self.served = Worker("test"), []
        self.started, self.gate = threading.Event(), threading.Event()
        self.first = self.worker.submit("first", self._block)
        assert self.started.wait(PATIENCE)

    def _block(self):
        self.started.set()
        assert self.gate.wait(PATIENCE)

    def add(self, owner, label=None):
        return self.worker.submit(owner, lambda: self.served.append(label or owner))

    def go(self, *futures):
        self.gate.set()
        for future in futures:
            if not future.cancelled():
                future.result(PATIENCE)
        self.worker.submit("last", lambda: None).result(PATIENCE)
        return self.served


@pytest.fixture
def held():
    made = Held()
    yield made
    made.gate.set()
    made.worker.close()


def test_a_full_card_is_one_sentence_that_holds_no_memory():
    import torch

    worker, full = Worker("test"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee …")

    def job(error):
        raise error

    faults = [worker.submit("a", lambda error=error: job(error)).exception(PATIENCE)
              for error in (full, RuntimeError("another"))]
    worker.close()
    assert isinstance(faults[0], memory.OutOfMemory) and str(faults[1]) == "another"
    assert "smaller tree" in str(faults[0]) and "\n" not in str(faults[0]) and str(faults[0]).endswith(".")
    assert faults[0].__cause__ is faults[0].__context__ is faults[0].__traceback__ is None


def test_owners_take_turns_and_each_is_served_in_order(held):
    futures = [held.add(label[0], label) for label in ("a0", "a1", "a2", "a3", "b0", "b1", "c0")]
    assert held.go(*futures) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_a_late_comer_waits_one_job_of_each_person_before_it(held):
    futures = [held.add("a", f"a{i}") for i in range(50)]
    futures.append(held.add("b", "b"))
    assert held.go(*futures).index("b") == 1


def test_others_wait_while_they_have_a_job_that_was_not_cancelled(held):
    held.add("a")
    assert not held.worker.others_wait("a") and held.worker.others_wait("b")
    held.worker.cancel("a")
    assert not held.worker.others_wait("b")


def test_one_job_runs_at_a_time_and_on_one_thread(held):
    running, most, threads = [], [], set()

    def job():
        running.append(1)
        threads.add(threading.get_ident())
        most.append(len(running))
        time.sleep(0.001)
        running.pop()

    futures, submitters = [], []
    for owner in "abcd":
        thread = threading.Thread(
            target=lambda owner=owner: futures.extend(held.worker.submit(owner, job) for _ in range(20)))
        submitters.append(thread)
        thread.start()
    for thread in submitters:
        thread.join()
    held.go(*futures)
    assert len(most) == 80 and set(most) == {1} and len(threads) == 1 and threading.get_ident() not in threads


def test_results_and_exceptions_reach_whoever_waits(held):
    class Odd(BaseException):
        pass

    def fail(error):
        raise error

    good = held.worker.submit("a", lambda: 42)
    failures = [(held.worker.submit("a", lambda error=error: fail(error)), type(error))
                for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(), Odd())]
    held.gate.set()
    assert good.result(PATIENCE) == 42
    for future, kind in failures:
        with pytest.raises(kind):
            future.result(PATIENCE)
    assert held.worker.submit("a", lambda: "alive").result(PATIENCE) == "alive"


def test_cancelled_jobs_are_skipped(held):
    keep, drop = held.add("a", "a0"), held.add("a", "a1")
    other, more = held.add("b"), held.add("a", "a2")
    assert drop.cancel()
    assert held.go(keep, other, more) == ["a0", "b", "a2"]
    with pytest.raises(CancelledError):
        drop.result(0)


def test_a_cancelled_job_takes_no_turn(held):
    stale, wanted = held.add("a", "stale"), held.add("a", "wanted")
    others = [held.add(owner) for owner in "bc"]
    stale.cancel()
    assert held.go(wanted, *others) == ["wanted", "b", "c"]


def test_cancel_drops_what_is_queued_and_not_what_runs(held):
    dropped, kept = [held.add("a") for _ in range(3)], held.add("b")
    held.worker.cancel("a")
    held.worker.cancel("first")
    held.worker.cancel("nobody")
    assert held.go(kept) == ["b"]
    assert all(future.cancelled() for future in dropped)
    assert held.first.result(PATIENCE) is None  # ran to its end
    again = held.add("a", "again")
    assert again.result(PATIENCE) is None and held.served == ["b", "again"]


def test_a_callback_may_queue_more_while_jobs_are_cancelled(held):
    first, second = held.add("a"), held.add("a")
    first.add_done_callback(lambda _: held.add("a", "from callback"))
    held.worker.cancel("a")
    assert second.cancelled()
    assert held.go() == ["from callback"]


def test_how_many_people_are_served_before(held):
    worker = held.worker
    assert worker.ahead_of("a") == 1 and worker.ahead_of("first") == 0  # one is running
    futures = [held.add("a"), held.add("a"), held.add("b")]
    assert [worker.ahead_of(owner) for owner in ("a", "b", "c")] == [1, 2, 3]
    worker.cancel("a")
    assert [worker.ahead_of(owner) for owner in ("b", "c")] == [1, 2]  # nobody waits for a cancelled job
    held.go(*futures)
    until(lambda: worker.ahead_of("a") == 0, "the end of the last job")


def test_close_finishes_the_running_job_and_cancels_the_rest():
    held = Held()
    waiting = [held.add("a"), held.add("b")]
    closer = threading.Thread(target=held.worker.close)
    closer.start()
    until(lambda: all(future.cancelled() for future in waiting), "the end of what waits")
    assert not held.first.done()
    with pytest.raises(WorkerClosed):
        held.worker.submit("a", lambda: None)
    held.gate.set()
    closer.join(PATIENCE)
    assert not closer.is_alive() and held.first.result(0) is None and held.served == []
    held.worker.close()  # once more does no harm


def test_close_of_an_idle_worker_and_from_its_own_thread():
    idle, own = Worker(), Worker()
    idle.close()
    assert own.submit("a", own.close).result(PATIENCE) is None


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_finished_job_is_kept(fails):
    worker = Worker()

    class Cache:
        pass

    cache = Cache()
    gone = weakref.ref(cache)

    def job(cache=cache):
        if fails:
            raise ValueError
        return cache

    future = worker.submit("a", job)
    assert future.exception(PATIENCE) is None or fails
    worker.ahead_of("a")
    del cache, job, future
    # field case A27: a closed session's memory returns without waiting for another job
    until(lambda: gc.collect() is not None and gone() is None, "the end of what the job held")
    worker.close()
