"""Simulates the schedule of a compiled program: which collectives overlap with computation, and what waits for them.

In a scheduled program the order of instructions is the order of execution, so a clock can be moved through it. What
an instruction or a collective costs is the caller's to say; this module knows what waits for what.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Mapping, Sequence

from zero_jax.hlo.opcodes import COLLECTIVES
from zero_jax.hlo.program import Instruction, Program
from zero_jax.hlo.traffic import Collective
from zero_jax.hlo.transfers import HostTransfer, NetworkTransfer, rendezvous

Key = tuple[str, str]
_NO_TIME = frozenset({"parameter", "constant", "send", "recv"})
_THREAD = re.compile(r'async_execution_thread="(sparsecore)"')
_NUM_NAMES = 3
_NETWORK = "network"  # between slices
_HOST = {False: "from the host", True: "to the host"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """What one execution of an asynchronous collective overlaps with."""

    seconds: float  # the computation that is scheduled between its start and its done
    instructions: tuple[str, ...]  # the longest of the instructions in between, as `name (file:line)`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """The time that a run of a program takes on one device."""

    total_seconds: float  # all of it: `compute_seconds` and `exposed_seconds`
    compute_seconds: float  # the ordinary instructions
    # Time in which computation waits for a collective or a copy from or to the host, or a synchronous collective runs
    # alone
    exposed_seconds: float
    collective_seconds: float  # all executions of all collectives and transfers between slices, hidden or not
    # One execution of each of those that are asynchronous, by (computation, name)
    overlaps: Mapping[Key, Overlap] = dataclasses.field(repr=False)
    network_seconds: float = 0.0  # of `collective_seconds`, the transfers between slices
    host_seconds: float = 0.0  # copies between the device and its host, hidden or not: the longer of the two directions
    kernel_seconds: float = 0.0  # of `compute_seconds`, the instructions that `is_kernel` chose


def own_links(collective: Collective) -> frozenset[Hashable]:
    """Returns links that a collective shares with those of the same groups or pairs of devices alone."""
    return frozenset((collective.source_target_pairs or frozenset(collective.replica_groups),))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Functions that return the seconds of one execution, with its links or its engine to itself."""

    # Of an instruction that is no collective; it is asked about fusions, never about what is inside them.
    instruction: Callable[[Program, Instruction], float]
    collective: Callable[[Collective], float]  # of a collective
    transfer: Callable[[NetworkTransfer], float] = lambda transfer: 0.0  # of a transfer between slices
    copy: Callable[[HostTransfer], float] = lambda copy: 0.0  # of a copy from or to the host
    # Whether an instruction counts in `kernel_seconds`; it is asked about custom calls.
    is_kernel: Callable[[Program, Instruction], bool] = lambda program, instruction: False
    # The links that a collective takes, under any names. By default those of the same groups of devices share them;
    # other groups, and permutes along other pairs (the two directions of a ring), have their own.
    links_of: Callable[[Collective], frozenset[Hashable]] = own_links


def play(
    program: Program,
    listed: Sequence[Collective],
    costs: Costs,
    *,
    transfers: Sequence[NetworkTransfer] = (),
    copies: Sequence[HostTransfer] = (),
    unknown_trip_count: int | None = None,
) -> Timeline:
    """Plays the schedule of a program as events on one device.

    Ordinary instructions and synchronous collectives follow one another. An asynchronous collective begins when it is
    started and its links are free, and its done waits for it. Collectives that share a link queue up; others run side
    by side. A loop's body is played once, from an idle network, and repeated; what is in flight around a loop is put
    back by the loop's own collectives. Of a conditional, the slower branch. Conditions of loops, and XLA:TPU's copies
    between HBM and VMEM (`copy-start`, `slice-start`), which run on engines of their own, cost nothing.

    A call on a SparseCore begins where it gets its operands: at its start, or at the first update with operands. The
    SparseCores run one call at a time, whatever its links: XLA:TPU gives all of them the same core.

    XLA:TPU drives some collectives on inside fusions with computation, between a fusion that starts and one that ends
    them: what runs in between is what they overlap with.

    Collectives that are not `listed` take no time. Transfers go from a `send` to the `recv-done`. The two directions of
    copies run side by side, but for what a kernel copies: all else waits for that.
    """
    player = _Player(
        program=program,
        costs=costs,
        by_key={(collective.computation, collective.name): collective for collective in listed},
        network={(transfer.computation, transfer.name): costs.transfer(transfer) for transfer in transfers},
        copies={(copy.computation, copy.name): copy for copy in copies},
        unknown_trip_count=unknown_trip_count,
    )
    run = player.computation(program.entry)
    host = [run.busy_seconds[direction] for direction in _HOST.values()]
    return Timeline(
        total_seconds=run.now,
        compute_seconds=run.compute_seconds,
        exposed_seconds=run.exposed_seconds,
        collective_seconds=run.collective_seconds - sum(host),
        network_seconds=run.busy_seconds[_NETWORK],
        host_seconds=max(host),
        kernel_seconds=run.kernel_seconds,
        overlaps={key: overlap for key, overlap in player.overlaps.items() if key not in player.copies},
    )


@dataclasses.dataclass
class _Flight:
    """An asynchronous collective between start and done; `handle` is what its done is known by."""

    key: Key
    links: frozenset[Hashable]
    handle: Hashable
    finish: float
    compute_at_start: float
    overlapped: list[tuple[float, Instruction]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Clock:
    """The clock of one computation and what its network does; `busy_seconds` and `free_at` go by link."""

    now: float = 0.0
    compute_seconds: float = 0.0
    kernel_seconds: float = 0.0
    exposed_seconds: float = 0.0
    collective_seconds: float = 0.0
    busy_seconds: dict[Hashable, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    free_at: dict[Hashable, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    in_flight: list[_Flight] = dataclasses.field(default_factory=list)

    def compute(self, seconds: float, instruction: Instruction) -> None:
        self.now += seconds
        self.compute_seconds += seconds
        for flight in self.in_flight:
            flight.overlapped.append((seconds, instruction))

    def wait(self, until: float) -> None:
        waited = max(until - self.now, 0.0)
        self.now += waited
        self.exposed_seconds += waited

    def start(self, key: Key, links: frozenset[Hashable], handle: Hashable, seconds: float, *, is_async: bool) -> None:
        """Puts an operation behind those that its links are busy with; a synchronous one ends at once."""
        finish = max([self.now, *(self.free_at[link] for link in links)]) + seconds
        self.collective_seconds += seconds
        for link in links:
            self.free_at[link] = finish
            self.busy_seconds[link] += seconds
        if is_async:
            self.in_flight.append(_Flight(key, links, handle, finish, self.compute_seconds))
        else:
            self.wait(finish)

    def repeat(self, body: "_Clock", times: int, loop: Instruction) -> None:
        """Adds what was played of a body by itself, as often as it runs; its collectives share links with others'."""
        self.collective_seconds += times * body.collective_seconds
        self.kernel_seconds += times * body.kernel_seconds
        # Before the clock moves: what is on a link now waits for all that the body sends over it.
        for flight in self.in_flight:
            if flight.finish > self.now:
                flight.finish += times * max(body.busy_seconds.get(link, 0.0) for link in flight.links)
        for link, seconds in body.busy_seconds.items():
            self.busy_seconds[link] += times * seconds
            if self.free_at[link] > self.now:
                self.free_at[link] += times * seconds
        self.now += times * body.exposed_seconds
        self.exposed_seconds += times * body.exposed_seconds
        self.compute(times * body.compute_seconds, loop)


@dataclasses.dataclass(kw_only=True)
class _Player:
    """Plays computations, each once."""

    program: Program
    costs: Costs
    by_key: Mapping[Key, Collective]
    network: Mapping[Key, float]
    copies: Mapping[Key, HostTransfer]
    unknown_trip_count: int | None
    played: dict[str, _Clock] = dataclasses.field(default_factory=dict)
    overlaps: dict[Key, Overlap] = dataclasses.field(default_factory=dict)

    def computation(self, name: str) -> _Clock:
        """Plays a computation from an idle network to the end of all that it started."""
        if name not in self.played:
            run = _Clock()
            self.run(run, name)
            for flight in run.in_flight:  # what ends in no instruction of it
                self.land(run, flight)
            self.played[name] = dataclasses.replace(run, in_flight=[])
        return self.played[name]

    def run(self, run: _Clock, computation: str) -> None:
        """Plays the instructions of a computation on a clock that may run already."""
        for instruction in self.program.computations[computation].values():
            opcode, part, key = instruction.opcode, instruction.part, instruction.key
            if key in self.by_key:
                self.collective(run, self.by_key[key], handle=key)
            elif key in self.network:
                handle = _NETWORK, rendezvous(instruction)
                run.start(key, frozenset((_NETWORK,)), handle, self.network[key], is_async=True)
            elif key in self.copies:
                copy = self.copies[key]
                run.start(key, frozenset((_HOST[copy.to_host],)), key, self.costs.copy(copy), is_async=copy.is_async)
            elif opcode == "recv-done":
                self.done(run, (_NETWORK, rendezvous(self.program.operand(instruction, 0) or instruction)))
            elif part == "done":
                self.done(run, self.started_by(instruction))
            elif part == "update":
                self.handed_over(run, instruction)
            elif opcode == "while":
                body = self.computation(instruction.called["body"])
                # Of a loop that takes no time the trip count need not be known.
                trips = self.program.num_trips(instruction, self.unknown_trip_count) if body.now else 0
                run.repeat(body, trips, instruction)
            elif opcode == "conditional":
                branches = [self.computation(name) for name in instruction.called.values()]
                run.repeat(max(branches, key=lambda branch: branch.now), 1, instruction)
            elif opcode == "call":  # on the same clock: what it starts may end after it
                for called in instruction.called.values():
                    self.run(run, called)
            elif opcode == "fusion" or (part == "start" and instruction.operands):
                self.wrapped(run, instruction)
            elif not (part or opcode in _NO_TIME or opcode in COLLECTIVES):
                seconds = self.costs.instruction(self.program, instruction)
                run.compute(seconds, instruction)
                if opcode == "custom-call" and self.costs.is_kernel(self.program, instruction):
                    run.kernel_seconds += seconds

    def wrapped(self, run: _Clock, instruction: Instruction) -> None:
        """A fusion, or an asynchronous call: a collective may be in it, begin in it or end in it."""
        called = instruction.first_called
        if inside := self.inside(called):
            handle = self.chain(called) if self.program.drives(called, "Start") else instruction.key
            engine = _THREAD.search(instruction.line)
            for collective in inside:
                self.collective(run, collective, handle=handle, engine=frozenset(engine.groups() if engine else ()))
        elif instruction.opcode == "fusion" and self.program.drives(called, "Done"):
            self.done(run, self.chain(called), first_only=True)  # of those in flight with these marks
        elif instruction.opcode == "fusion":
            run.compute(self.costs.instruction(self.program, instruction), instruction)
        elif called:  # what is computed on the side is taken to be computed where it starts
            run.repeat(self.computation(called), 1, instruction)

    def handed_over(self, run: _Clock, update: Instruction) -> None:
        """An `-update`: XLA:TPU (JAX 0.12) starts a call on a SparseCore without operands, and hands them over here."""
        computation, name = handle = self.started_by(update)
        start = self.program.computations[computation].get(name)
        is_first = all(flight.handle != handle for flight in run.in_flight)  # of several updates of a call
        if start and not start.operands and len(update.operands) > 1 and is_first:
            self.wrapped(run, start)

    def inside(self, computation: str) -> list[Collective]:
        """The collectives in a computation and in what it calls."""
        instructions = self.program.computations.get(computation, {}).values()
        inside = [self.by_key[instruction.key] for instruction in instructions if instruction.key in self.by_key]
        for instruction in instructions:
            if instruction.opcode in ("call", "fusion") or instruction.part == "start":
                for called in instruction.called.values():
                    inside += self.inside(called)
        return inside

    def collective(
        self, run: _Clock, collective: Collective, *, handle: Hashable, engine: frozenset[Hashable] = frozenset()
    ) -> None:
        """Starts a collective. What runs on an engine of its own takes that, too."""
        key, links = (collective.computation, collective.name), self.costs.links_of(collective) | engine
        run.start(key, links, handle, self.costs.collective(collective), is_async=collective.is_async)

    def done(self, run: _Clock, handle: Hashable, *, first_only: bool = False) -> None:
        """Waits for what was started under a handle; it may be nothing, where the start was synchronous."""
        flights = [flight for flight in run.in_flight if flight.handle == handle]
        for flight in flights[:1] if first_only else flights:
            run.in_flight.remove(flight)
            self.land(run, flight)

    def land(self, run: _Clock, flight: _Flight) -> None:
        """Notes what a collective overlapped with when it has ended."""
        run.wait(flight.finish)
        longest = sorted(flight.overlapped, key=lambda entry: -entry[0])[:_NUM_NAMES]
        self.overlaps[flight.key] = Overlap(
            seconds=run.compute_seconds - flight.compute_at_start,
            instructions=tuple(self.shown(instruction) for seconds, instruction in longest if seconds),
        )

    def shown(self, instruction: Instruction) -> str:
        source = self.program.source(instruction.line)
        return f"{instruction.name} ({source})" if source else instruction.name

    def started_by(self, done: Instruction) -> Key:
        """The key of the start that a `-done` belongs to, through `-update`s."""
        start = self.program.operand(done, 0)
        if start and start.part == "update":
            return self.started_by(start)
        return done.computation, done.operands[0]

    def chain(self, computation: str) -> Hashable:
        """What the fusions that start, drive on and end one collective have in common: kind, channel and chain."""
        for instruction in self.program.computations[computation].values():
            if instruction.opcode in COLLECTIVES:
                marks = re.findall(r'\b(?:channel_id=\d+|chain_id="\d+")', instruction.line)
                return (instruction.opcode, *marks)
        return computation
