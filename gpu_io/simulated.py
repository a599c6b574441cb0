"""A device without hardware: streams that run when a scheduler says so, on CPU tensors, and a witness of every access.

Each stream is a queue. A scheduler, from a seed, decides whose turn it is and how much runs whenever the host calls, so
that any delay of any stream can be had again. Memory is filled with ``POISON`` before its first use and when it is
freed. Every access that a work declares is checked against what orders it: a missing wait is found in whatever order
things happened to run. Waits can be left out one by one, to see that this finds them.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from gpu_io.bounced_ticket import BouncedTicket
from gpu_io.hazards import Clock, HazardError, Hazards
from gpu_io.host_runtime import HostRuntime
from gpu_io.ranges import Ranges, ranges_of
from gpu_io.streams import Batch, Fence, Work

POISON = 0xAA


class Scheduler(Protocol):
    """Whose turn it is."""

    def num_turns(self) -> int:
        """How many may go on now that the host calls."""

    def lets_pass(self) -> bool:
        """Whether the host, which asks for a fence, has waited for it long enough."""

    def choose(self, ready: Sequence["SimulatedStream"]) -> "SimulatedStream":
        """One of the streams that can go on; there is at least one."""


class Prompt:
    """Everything runs as soon as it can: what a fast device does with a slow host."""

    def num_turns(self) -> int:
        """All there are."""
        return sys.maxsize

    def lets_pass(self) -> bool:
        """Whatever can pass has passed."""
        return True

    def choose(self, ready: Sequence["SimulatedStream"]) -> "SimulatedStream":
        """The first."""
        return ready[0]


class Random:
    """A few turns at a time, of any stream."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def num_turns(self) -> int:
        """Often none, sometimes many."""
        return self._chance.choice((0, 0, 1, 1, 2, 8))

    def lets_pass(self) -> bool:
        """Now and then."""
        return self._chance.random() < 0.5

    def choose(self, ready: Sequence["SimulatedStream"]) -> "SimulatedStream":
        """Any of them."""
        return self._chance.choice(ready)


class Adversarial:
    """Nothing runs before somebody has to wait for it, and then one stream runs as far ahead of another as it can."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._ranks: dict[SimulatedStream, float] = {}

    def num_turns(self) -> int:
        """None: only who waits makes the device run."""
        return 0

    def lets_pass(self) -> bool:
        """Not at once."""
        return self._chance.random() < 0.5

    def choose(self, ready: Sequence["SimulatedStream"]) -> "SimulatedStream":
        """The favourite of the seed."""
        for stream in ready:
            self._ranks.setdefault(stream, self._chance.random())
        return max(ready, key=self._ranks.__getitem__)


class SimulatedFence:
    """A point in a stream."""

    def __init__(self, device: "SimulatedDevice", clock: Clock) -> None:
        self._device = device
        self.clock = clock
        self.is_passed = False

    def query(self) -> bool:
        """Whether the stream has passed it; whoever asks again and again sees it pass some day."""
        if self._device.is_removed():
            return True
        self._device.take_turns()
        if self._device.scheduler.lets_pass():
            self._device.run_until(lambda: self.is_passed)
        if self.is_passed:
            self._device.hazards.learn(self._device.host, self.clock)
        return self.is_passed

    def wait(self) -> None:
        """Let compute wait for it."""
        if not self._device.is_removed():
            self._device.compute.wait_here(self)


class SimulatedStream:
    """A queue of works, of fences to pass and of fences to wait for."""

    def __init__(self, device: "SimulatedDevice", name: str) -> None:
        self.name = name
        self._device = device
        self._actor = device.hazards.actor(name)
        self._queue: deque[Work | tuple[str, SimulatedFence]] = deque()

    def submit(self, work: Work) -> None:
        """Queue a work, and check that what it touches is in order."""
        device = self._device
        if self is not device.compute:
            device.fail_if_due()
        device.hazards.learn(self._actor, device.hazards.clock(device.host))
        device.hazards.access(self._actor, work.reads(), work.writes(), type(work).__name__)
        self._queue.append(work)
        device.take_turns()

    def wait(self, fence: Fence) -> None:
        """Queue a wait."""
        assert isinstance(fence, SimulatedFence)
        if not self._device.is_removed():
            self.wait_here(fence)

    def wait_here(self, fence: SimulatedFence) -> None:
        """Queue a wait that is not to be taken out."""
        self._device.hazards.learn(self._actor, fence.clock)
        self._queue.append(("wait", fence))

    def fence(self) -> SimulatedFence:
        """Queue a point to pass."""
        hazards = self._device.hazards
        hazards.learn(self._actor, hazards.clock(self._device.host))
        fence = SimulatedFence(self._device, hazards.clock(self._actor))
        self._queue.append(("pass", fence))
        return fence

    @property
    def is_empty(self) -> bool:
        """Whether all it was given has run."""
        return not self._queue

    @property
    def can_go_on(self) -> bool:
        """Whether there is something to run, and it waits for nothing."""
        if not self._queue:
            return False
        head = self._queue[0]
        return not isinstance(head, tuple) or head[0] == "pass" or head[1].is_passed

    def go_on(self) -> None:
        """Run what is next."""
        head = self._queue.popleft()
        if not isinstance(head, tuple):
            head.run()
        elif head[0] == "pass":
            head[1].is_passed = True


class SimulatedDevice:
    """Streams over CPU memory, in one thread. ``compute`` is the stream of the engine; ``host`` is an actor too."""

    def __init__(self, scheduler: Scheduler | None = None, *, without: str | None = None) -> None:
        """``without`` is a wait to leave out, as ``waits`` names it."""
        self.hazards = Hazards()
        self.host = self.hazards.actor("the host")
        self.waits: set[str] = set()
        """The waits that were made in this package, each by the lines it was called from, the innermost first."""
        self.is_held = False
        """While it is, no stream goes on: a device that hangs."""
        self.fail_after: int | None = None
        """After so many more works the device takes none, as if it had no memory left."""
        self.compute = SimulatedStream(self, "compute")
        self._streams = [self.compute]
        self.scheduler = scheduler or Prompt()
        self.runtime: HostRuntime | None = None
        """What registers host memory; a test may give one."""
        self.many_at_once: Batch | None = None
        """What copies in batches; a test may give one."""
        self._without = without
        self._pinned: set[int] = set()
        self._known: dict[int, Tensor] = {}  # kept, so that no other memory gets the address

    # ---- what the pipeline asks for

    def stream(self) -> SimulatedStream:
        """A new stream."""
        self._streams.append(SimulatedStream(self, f"stream {len(self._streams)}"))
        return self._streams[-1]

    def compute_fence(self) -> SimulatedFence:
        """The point after all that compute was given so far."""
        return self.compute.fence()

    def memory(self, num_bytes: int) -> Tensor:
        """Poisoned bytes, which compute was the last to use."""
        memory = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.know(memory, "device memory")
        self.compute.submit(_OtherUse(memory))
        return memory

    def pinned(self, values: Sequence[int]) -> Tensor:
        """``values``, written by the host."""
        return self._of_the_host(torch.tensor(values, dtype=torch.int64))

    def pinned_memory(self, num_bytes: int) -> Tensor:
        """Poisoned bytes, written by the host."""
        return self._of_the_host(torch.full((num_bytes,), POISON, dtype=torch.uint8))

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        """Where streams may touch neither side at the same time."""
        self.host_reads(source)
        self.host_writes(target)
        target.copy_(source)

    def free(self, memory: Tensor) -> None:
        """Compute is the next to use it, or the host what is pinned. Who else touches it touches what is nobody's."""
        address = memory.data_ptr()
        if address in self._pinned:
            self._pinned.remove(address)
            self.host_writes(memory)
            memory.view(torch.uint8).fill_(POISON)
        elif memory.numel():
            self.compute.submit(_OtherUse(memory))
        if memory.numel():
            self.hazards.forget(address)
            del self._known[address]

    def batch(self) -> Batch | None:
        """``many_at_once``."""
        return self.many_at_once

    def host_runtime(self) -> HostRuntime | None:
        """``runtime``."""
        return self.runtime

    # ---- the world around it

    def know(self, memory: Tensor, name: str) -> None:
        """Memory that streams may touch: an engine's pages, slots. Contiguous, on the CPU."""
        if memory.numel():
            self._known[memory.data_ptr()] = memory
            self.hazards.know(name, memory.data_ptr(), memory.numel() * memory.itemsize)

    def host_reads(self, memory: Tensor) -> None:
        """The host looks at ``memory``. Raises ``HazardError`` if it may not be what it is to be yet."""
        self.hazards.access(self.host, [ranges_of(memory)], [], "the host")

    def host_writes(self, memory: Tensor) -> None:
        """The host overwrites ``memory``. Raises ``HazardError`` if somebody may not be through with it."""
        self.hazards.access(self.host, [], [ranges_of(memory)], "the host")

    def finish(self) -> None:
        """Run until nothing can go on. Raises ``HazardError`` if something is left that waits for ever."""
        self.run_until(lambda: False)
        stuck = [stream.name for stream in self._streams if not stream.is_empty]
        if stuck and not self.is_held:
            raise HazardError(f"{', '.join(stuck)} wait for what nobody will do")

    def finish_compute(self) -> None:
        """Run until compute has nothing left to do. Raises ``HazardError`` if it waits for ever."""
        self.run_until(lambda: self.compute.is_empty)
        if not self.compute.is_empty:
            raise HazardError("compute waits for what nobody will do")

    # ---- for streams and fences

    def take_turns(self) -> None:
        """Let streams go on as the scheduler likes."""
        for _ in range(self.scheduler.num_turns()):
            if not self._step():
                return

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Let streams go on that far, or as far as they can."""
        while not is_reached() and self._step():
            pass

    def is_removed(self) -> bool:
        """Whether the wait that the caller's caller makes is to be left out."""
        frame: FrameType | None = sys._getframe(2)
        places = []
        while frame is not None and (name := _product_file(frame.f_code.co_filename)):
            places.append(f"{name}:{frame.f_lineno}")
            if frame.f_code is BouncedTicket.begin_round.__code__:
                break  # whoever asks after a ticket makes it go on, and that is no other wait
            frame = frame.f_back
        where = " < ".join(places)
        self.waits.add(where)
        return where == self._without

    def fail_if_due(self) -> None:
        """Raises what torch does, if it is time."""
        if self.fail_after is not None:
            self.fail_after -= 1
            if self.fail_after < 0:
                self.fail_after = None
                raise torch.OutOfMemoryError("the simulated device is out of memory")

    def _of_the_host(self, pinned: Tensor) -> Tensor:
        self.know(pinned, "pinned memory")
        self.host_writes(pinned)
        self._pinned.add(pinned.data_ptr())
        return pinned

    def _step(self) -> bool:
        ready = [] if self.is_held else [stream for stream in self._streams if stream.can_go_on]
        if ready:
            with torch.inference_mode():
                self.scheduler.choose(ready).go_on()
        return bool(ready)


class _OtherUse:
    """What compute does with memory before it is given out, or when it was given back."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def run(self) -> None:
        self._memory.view(torch.uint8).fill_(POISON)

    def reads(self) -> list[Ranges]:
        return []

    def writes(self) -> list[Ranges]:
        return [ranges_of(self._memory)]


@cache
def _product_file(filename: str) -> str | None:
    """The name of a file whose waits are the pipeline's own, and not those of who tests it."""
    path = Path(filename)
    return path.name if path.parent == Path(__file__).parent and path.name != "testing.py" else None
