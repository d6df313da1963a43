"""One worker thread per model does all torch work; sessions queue jobs and are served in turn.

One job is one step, so nobody waits longer than one step of each person before them. A job whose future was
cancelled is skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from medusa_viz.models import memory


class WorkerClosed(RuntimeError):
    """The worker takes no more jobs."""


class Worker:
    """Round-robin over owners, first come first served within one."""

    def __init__(self, name: str = "model") -> None:
        self._queues: dict[str, deque[tuple[Future, Callable[[], object]]]] = {}
        self._turns: deque[str] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._busy: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}", daemon=True)
        self._thread.start()

    def submit(self, owner: str, job: Callable[[], object]) -> Future:
        """Queue `job` for `owner`; its result or exception arrives in the future."""
        future: Future = Future()
        with self._condition:
            if self._closed:
                raise WorkerClosed("The model is being unloaded.")
            if owner not in self._queues:
                self._queues[owner] = deque()
                self._turns.append(owner)
            self._queues[owner].append((future, job))
            self._condition.notify()
        return future

    def ahead_of(self, owner: str) -> int:
        """How many other owners are served before `owner`'s next job."""
        with self._condition:
            before = 0
            for other in self._turns:
                if other == owner:
                    break
                before += any(not future.cancelled() for future, _ in self._queues[other])
            return before + (self._busy is not None and self._busy != owner)

    def others_wait(self, owner: str) -> bool:
        """Whether somebody else has a job in the queue."""
        with self._condition:
            return any(not future.cancelled() for other in self._turns if other != owner
                       for future, _ in self._queues[other])

    def cancel(self, owner: str) -> None:
        """Drop the owner's queued jobs; one that is running finishes."""
        with self._condition:
            for future, _ in list(self._queues.get(owner, ())):  # a copy: a future's callback may queue more
                future.cancel()

    def close(self) -> None:
        """Finish the running job, cancel the others, end the thread."""
        with self._condition:
            self._closed = True
            for future, _ in [entry for queue in self._queues.values() for entry in queue]:
                future.cancel()
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Wait for a job and do it; False once closed. A call of its own, so that no job, and with it a session's
        cache, is kept alive while the next one is awaited."""
        with self._condition:
            self._busy = None
            while not self._turns and not self._closed:
                self._condition.wait()
            if not self._turns:
                return False
            owner = self._turns.popleft()
            queue = self._queues[owner]
            while queue and not queue[0][0].set_running_or_notify_cancel():
                queue.popleft()  # a cancelled job takes no turn
            future, job = queue.popleft() if queue else (None, None)
            if queue:
                self._turns.append(owner)
            else:
                del self._queues[owner]
            self._busy = owner if future else None
        if future:
            try:
                future.set_result(job())
            except BaseException as error:  # handed to whoever waits for the future, whatever it is
                future.set_exception(memory.spoken(error))
        return True
