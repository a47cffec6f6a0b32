"""The harness: every case in a process of its own, all of a workload alive together, steps in turns.

For each workload eager PyTorch is set up first; then the other cases, as many at a time as there are cores. When as many are alive
as may be, nothing is set up any more and they take turns, eager among them, in rounds; a ratio is the median over the rounds of
a case's time over eager's. Then the next ones. What does not fit into the time that was given is left out, and the results say so.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.systems import Case
from benchmarks.worker import Task, serve

__all__ = ["Budget", "Harness", "Record", "brief", "summary"]

Record = dict[str, Any]
"""Figures of one case, as they are written to the JSON file."""

MOST_ALIVE = {"cpu": 6, "cuda": 2}
"""Cases of a workload that are alive together, beside eager: each holds its parameters and optimizer state all the time."""
PATIENCE = (240.0, 60)
"""Setting up a case is given up after so many seconds and so many of eager's steps, or after half of the workload's time if that
is more; eager itself has a day."""
LATE: Record = {"skipped": "no time was left"}
ROUNDS = (3, 11)
TURN = 0.25
"""Seconds that a turn lasts at least: several steps, where they are short."""
SETTING_UP = 0.7
"""Part of a workload's time after which no further case is begun."""


@dataclass
class Budget:
    """How the time that is left is shared among the workloads that are left."""

    seconds: float
    """For all."""
    began: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """On the monotonic clock."""
        return self.began + self.seconds

    def ends(self, parts: int) -> float:
        """When the next of so many parts has to be done."""
        return time.monotonic() + max(0.0, self.deadline - time.monotonic()) / parts


class _Worker:
    """The parent's end of a worker."""

    def __init__(self, context: Any, task: Task) -> None:
        self.case = task.case
        self.pipe: Connection
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(task, other))
        self.began = time.monotonic()
        self.process.start()
        other.close()
        self.record: Record = {}
        self.turns: list[dict[str, float]] = []

    @property
    def alive(self) -> bool:
        """Did it send figures, and can it be asked for steps?"""
        return "seconds" in self.record

    def hear(self) -> None:
        """Take in what it sent after setting up."""
        self.record = self._receive()

    def turn(self, count: int) -> None:
        """So many steps."""
        found: Record = {}
        with suppress(OSError):  # of a pipe without a reader; what is received then says that the process has ended
            self.pipe.send(count)
        found = self._receive()
        if "error" in found:
            self.record = found
        else:
            self.turns.append(found)

    def close(self, patience: float = 10.0) -> None:
        """End the process, by force if it does not listen."""
        with suppress(OSError):
            self.pipe.send(0)
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()

    def _receive(self) -> Record:
        try:
            found: Record = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(1)
            return {"error": f"the process ended with code {self.process.exitcode}"}
        return found


@dataclass
class Harness:
    """How cases are run."""

    preset: str
    device: str
    folder: Path
    """For caches and logs."""
    jobs: int
    """Cases that are set up at a time."""
    rounds: int | None = None
    """Exactly so many, whatever time is left."""
    deadline: float = math.inf
    """On the monotonic clock: what is not set up by then is given up."""
    say: Callable[[str, Case, str], None] = lambda *_: None
    """Told what happens, at once: (workload, case, what)."""

    def __post_init__(self) -> None:
        if self.device == "cpu":
            os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # Workers are forked off a process that has imported all this and started no thread.
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch._dynamo", "transformers.modeling_utils", "benchmarks.worker"])

    def run(
        self, workload: str, cases: Sequence[Case], ends: float, changes: dict[str, Any] | None = None
    ) -> list[Record]:
        """All cases (eager first) of a workload, until `ends` on the monotonic clock. One record for each, in order."""
        return _Run(self, workload, list(cases), ends, changes or {}).records()

    def alone(self, workload: str, case: Case, steps: int, changes: dict[str, Any] | None = None) -> Record:
        """One case without others: its seconds are the mean of so many steps, and it is compared with nothing."""
        return _Run(self, workload, [case], self.deadline, changes or {}).alone(steps)


class _Run:
    """The cases of one workload."""

    def __init__(
        self, harness: Harness, workload: str, cases: list[Case], ends: float, changes: dict[str, Any]
    ) -> None:
        self.harness, self.workload, self.cases, self.changes = harness, workload, cases, changes
        self.rest = cases[1:]
        self.ends = ends
        self.latest = time.monotonic() + SETTING_UP * (ends - time.monotonic())
        self.found: dict[Case, Record] = {}
        self.patience = 24 * 3600.0

    def records(self) -> list[Record]:
        """Run them all."""
        self.eager = self._start(self.cases[0])
        try:
            if self._await([self.eager]):
                usual = PATIENCE[0] + PATIENCE[1] * self.eager.record["seconds"]
                self.patience = max(usual, (self.ends - time.monotonic()) / 2)
            while self.eager.alive and self.rest and time.monotonic() < self.latest:
                self._group()
            if self.eager.alive and not self.eager.turns:
                self._take_turns([])
        finally:
            self.eager.close()
        self.found[self.eager.case] = self.eager.record | summary(self.eager.turns, self.eager.turns)
        why = LATE if self.eager.alive or self.eager.record == LATE else {"skipped": "eager PyTorch failed"}
        return [
            {"workload": self.workload, "system": c.system, "setting": c.setting, **self.found.get(c, why)}
            for c in self.cases
        ]

    def alone(self, steps: int) -> Record:
        """Run the only case."""
        worker = self._start(self.cases[0])
        if self._await([worker]):
            worker.turn(steps)
            worker.close()
        return worker.record | summary(worker.turns, worker.turns)

    def _group(self) -> None:
        """Set up as many cases as may be alive; then they take turns."""
        pending: list[_Worker] = []
        alive: list[_Worker] = []
        try:
            while True:
                room = len(alive) + len(pending) < MOST_ALIVE[self.harness.device] and len(pending) < self.harness.jobs
                if self.rest and room and time.monotonic() < self.latest:
                    pending.append(self._start(self.rest.pop(0)))
                elif pending:
                    alive += self._await(pending)
                else:
                    break
            first = len(self.eager.turns)
            self._take_turns(alive)
            for worker in alive:
                self.found[worker.case] = worker.record | summary(worker.turns, self.eager.turns[first:])
        finally:
            for worker in pending:
                worker.process.kill()
            for worker in pending + alive:
                worker.close()

    def _start(self, case: Case) -> _Worker:
        self.harness.say(self.workload, case, "…")
        task = Task(self.workload, self.harness.preset, case, self.harness.device, self.harness.folder, self.changes)
        return _Worker(self.harness.context, task)

    def _await(self, pending: list[_Worker]) -> list[_Worker]:
        """Wait for one of them at least; those that live on. `pending` loses all that are done."""
        # Without eager there is nothing to compare with: it may take of the time of the workloads that follow.
        ends = {w: self.harness.deadline if w.case == self.cases[0] else self.ends for w in pending}
        late = {w: min(w.began + self.patience, ends[w]) for w in pending}
        heard = wait([w.pipe for w in pending], max(0.0, min(late.values()) - time.monotonic()))
        alive = []
        for worker in list(pending):
            if worker.pipe in heard:
                worker.hear()
            elif time.monotonic() >= late[worker]:
                given_up = {"error": f"not set up within {self.patience:.0f} seconds"}
                worker.record = LATE if time.monotonic() >= ends[worker] else given_up
                worker.process.kill()
            else:
                continue
            pending.remove(worker)
            self.found[worker.case] = worker.record
            self.harness.say(self.workload, worker.case, brief(worker.record))
            if worker.alive:
                alive.append(worker)
            else:
                worker.close()
        return alive

    def _take_turns(self, others: list[_Worker]) -> None:
        """Rounds, each in the other direction than the one before; while cases are waiting, for a quarter of the time at most."""
        workers = [self.eager, *others]
        count = max(1, round(TURN / self.eager.record["seconds"]))
        until = self.ends if not self.rest else time.monotonic() + (self.ends - time.monotonic()) / 4
        least, most = (self.harness.rounds,) * 2 if self.harness.rounds else ROUNDS
        last = sum(w.record["seconds"] for w in workers) * count
        for i in range(most):
            if i >= least and time.monotonic() + last > until:
                break
            began = time.monotonic()
            for worker in workers if i % 2 == 0 else workers[::-1]:
                if worker.alive:
                    worker.turn(count)
            last = time.monotonic() - began


def summary(turns: Sequence[dict[str, float]], eager: Sequence[dict[str, float]]) -> Record:
    """Medians and quartiles over the rounds, of seconds and of their ratio to eager's; joules likewise."""
    pairs = list(zip(turns, eager, strict=False))  # fewer turns, if it has ended in between
    if not pairs:
        return {}
    out: Record = {"rounds": len(pairs)}
    for what in pairs[0][0]:
        out[what], out[f"{what}_spread"] = _spread(t[what] for t, _ in pairs)
        out[f"{what}_ratio"], out[f"{what}_ratio_spread"] = _spread(t[what] / e[what] for t, e in pairs)
    return out


def _spread(numbers: Iterable[float]) -> tuple[float, tuple[float, float]]:
    """Median, and the quartiles."""
    found = sorted(numbers)
    if len(found) < 2:
        return found[0], (found[0], found[0])
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return middle, (low, high)


def brief(record: Record) -> str:
    """A record in a few words."""
    if "peak_bytes" not in record:
        return str(next((record[k] for k in ("error", "infeasible", "skipped") if k in record), "?"))
    return (
        f"{record['peak_bytes'] / 2**20:.1f} MiB, {record['seconds']:.3f} s, set up in {record['setup_seconds']:.0f} s"
    )
