# ruff: noqa: D102 - the name of a test says what it asserts
"""What every copier promises, as tests to inherit, and pages and slots to try one on.

A subclass named ``Test...`` says how its copier is opened, and on which device.
"""

import ctypes
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_io.code_definition import restored, stored
from gpu_io.copier import Copier, Ticket
from gpu_io.pages import PagedKV
from kvstore.errors import ClosedError, LayoutError

ORDER = ("page", "layer", "plane", "token", "head", "dim")
IN_ORDER = (
    "page layer plane token head dim",
    "layer page plane token head dim",
    "page plane token head dim",
    "plane page token head dim",
)
"""Arrangements in which the bytes of a page in one layer and plane are one run."""
STRIDED = (
    "page layer plane head token dim",
    "page plane head token dim",
    "plane page head token dim",
    "plane head page token dim",
)
MLA = "page token dim"
BY_STRIPE = "page head layer plane token dim"
"""A page is one run where each of its heads is a stripe."""
DEGREES = (1, 2, 4, 8)
"""Of tensor parallelism."""
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
NUM_PAGES, NUM_LAYERS, TOKENS_PER_PAGE = 9, 3, 4
GUARD = 0xAA
QUANTISED_PAGES: tuple[tuple[str, str, torch.dtype, int], ...] = (
    (IN_ORDER[0], "int8", torch.bfloat16, 1),
    (IN_ORDER[3], "fp8", torch.float32, 2),
    (STRIDED[0], "fp8", torch.float16, 1),
    (BY_STRIPE, "int8", torch.float32, 2),
    (STRIDED[3], "int8", torch.float16, 1),
    (IN_ORDER[1], "fp8", torch.bfloat16, 1),
    (STRIDED[1], "fp8", torch.bfloat16, 2),
    (STRIDED[2], "int8", torch.float32, 1),
    (IN_ORDER[2], "int8", torch.bfloat16, 1),
)
"""Axes, format, dtype and stripes: every arrangement of K and V, and every format of every dtype."""


class Pages:
    """An engine's tensors in one arrangement, whose content is also read as [page, layer, plane, token, head, dim].

    It has its own notion of axes, of stripes and of codes, so that a mistake in ``PagedKV`` shows. Of a model with
    ``num_heads`` it has ``heads``, all by default.
    """

    def __init__(
        self,
        axes: str,
        seed: int,
        *,
        dtype: torch.dtype,
        device: str,
        pages_per_block: int = 1,
        num_heads: int = 2,
        heads: slice = slice(None),
        num_stripes: int = 1,
        quantisation: str = "",
    ) -> None:
        self._names = axes.split()
        self._num_stripes = num_stripes
        self._quantisation = quantisation
        num_planes = 2 if "plane" in self._names else 1
        shape = (NUM_PAGES, NUM_LAYERS, num_planes, TOKENS_PER_PAGE, num_heads if "head" in self._names else 1, 8)
        generator = torch.Generator().manual_seed(seed)
        content = torch.randint(-100, 100, shape, generator=generator).to(dtype).to(device)[..., heads, :]
        one_by_one = [content] if "layer" in self._names else [content[:, [layer]] for layer in range(NUM_LAYERS)]
        self.tensors = [self._arranged(part) for part in one_by_one]
        self.kv = PagedKV(
            self.tensors, axes, pages_per_block=pages_per_block, num_stripes=num_stripes, quantisation=quantisation
        )

    def content(self) -> Tensor:
        """What is in all pages now, on the host."""
        return torch.cat([self._canonical(tensor) for tensor in self.tensors], dim=1).cpu()

    def block(self, pages: Sequence[int]) -> bytes:
        """The bytes that the block in ``pages`` must have: ``[stripe][layer][plane][token][head][dim]``, and scales."""
        tokens = torch.cat([self.content()[page] for page in pages], dim=2)
        stripes = tokens.chunk(self._num_stripes, dim=3)
        if self._quantisation:
            return b"".join(stored(layer.float().numpy(), self._quantisation) for part in stripes for layer in part)
        return b"".join(stripe.contiguous().view(torch.uint8).numpy().tobytes() for stripe in stripes)

    def loaded(self, block: bytes) -> Tensor:
        """What a block that is ``quantised`` must become, ``[layer, plane, token, head, dim]``."""
        layout = self.kv.layout
        shape = (2, layout.tokens_per_block, layout.num_heads // self._num_stripes, layout.plane_dims[0])
        pieces = np.frombuffer(block, dtype=np.uint8).reshape(self._num_stripes, layout.num_layers, -1)
        stripes = [torch.stack([restored(piece, shape, self._quantisation) for piece in part]) for part in pieces]
        return torch.cat(stripes, dim=3).to(self.tensors[0].dtype)

    def _full_order(self) -> list[str]:
        return [*self._names, *(name for name in ORDER if name not in self._names)]

    def _arranged(self, content: Tensor) -> Tensor:
        full = content.permute([ORDER.index(name) for name in self._full_order()]).contiguous()
        return full.reshape(full.shape[: len(self._names)])

    def _canonical(self, tensor: Tensor) -> Tensor:
        full = tensor.reshape(*tensor.shape, *[1] * (len(ORDER) - tensor.dim()))
        return full.permute([self._full_order().index(name) for name in ORDER])


class Slots:
    """Slots of one block in one piece of memory, ``gap_bytes`` of guard after each."""

    def __init__(self, kv: PagedKV, num_slots: int, gap_bytes: int = 0) -> None:
        self._stride = kv.layout.block_bytes + gap_bytes
        self.memory = bytearray([GUARD]) * (self._stride * num_slots)
        starts = range(0, len(self.memory), self._stride)
        self.views = [memoryview(self.memory)[start : start + kv.layout.block_bytes] for start in starts]

    def guards(self) -> set[int]:
        """The different bytes between the slots."""
        size = self.views[0].nbytes
        return {byte for start in range(0, len(self.memory), self._stride) for byte in self._gap(start + size)}

    def _gap(self, start: int) -> bytes:
        return bytes(self.memory[start : start + self._stride - self.views[0].nbytes])


def started(ticket: Ticket | None) -> Ticket:
    """A ticket where a copier cannot be busy."""
    assert ticket is not None
    return ticket


def finish(ticket: Ticket | None) -> None:
    """Wait for a copy that must succeed."""
    started(ticket).wait()
    assert started(ticket).done()
    assert not started(ticket).failed


class FakeLibrary:
    """Host registration as CUDA and HIP do it, and a fake: it pins nothing, and says so in every error.

    ``fail_at`` is the number of the call that finds no memory, from 0.
    """

    def __init__(self, prefix: str = "cuda", *, fail_at: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        """Bytes by address."""
        self.last_error = 0
        """What stays until somebody takes it away."""
        self.calls: list[tuple[str, int]] = []
        self._fail_at = fail_at
        setattr(self, prefix + "HostRegister", self.register)
        setattr(self, prefix + "HostUnregister", self.unregister)
        setattr(self, prefix + "GetLastError", self.get_last_error)
        setattr(self, prefix + "GetErrorString", lambda code: b"error %d of a fake that pins nothing" % code.value)

    def register(self, address: c_void_p, num_bytes: c_size_t, flags: c_uint) -> int:
        start, size = address.value or 0, num_bytes.value
        self.calls.append(("register", size))
        if size == 0:
            return self._error(1)
        if self._fail_at is not None and len(self.calls) > self._fail_at:
            return self._error(2)
        if any(start < other + theirs and other < start + size for other, theirs in self.registered.items()):
            return self._error(712)
        self.registered[start] = size
        return 0

    def unregister(self, address: c_void_p) -> int:
        self.calls.append(("unregister", self.registered.get(address.value or 0, 0)))
        return 0 if self.registered.pop(address.value or 0, None) else self._error(713)

    def get_last_error(self) -> int:
        error, self.last_error = self.last_error, 0
        return error

    def _error(self, code: int) -> int:
        self.last_error = code
        return code


class FakeDriver:
    """libcuda as it is asked for batches of copies, and a fake: it has no device, and copies while it is called.

    It has its own notion of the calls, so that a mistake in ``DriverBatch`` shows. ``version`` is the driver's, as it
    writes it. From the call number ``refuse_from`` on, counted from 0, it refuses, and may have made copies before.
    """

    def __init__(self, *, version: int = 13000, refuse_from: int | None = None) -> None:
        self.refuse_from = refuse_from
        self.calls: list[list[tuple[int, int, int]]] = []
        """Of each batch the copies: target, source, bytes."""
        self.attributes: list[tuple[int, ...]] = []
        """Of each batch: order of sources, two hints of a type and an id, flags; first copy, how many, stream."""
        self.asked: list[int] = []
        """Versions that the call was asked for in."""
        self._version = version
        arrays, count = [c_void_p] * 3, c_size_t
        first = [c_int, *arrays, count, c_void_p, c_void_p, c_size_t]
        self._entries = {
            12080: ctypes.CFUNCTYPE(*first, c_void_p, c_void_p)(self._copy_12080),
            13000: ctypes.CFUNCTYPE(*first, c_void_p)(self._copy_13000),
        }

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802 - the driver's name
        version._obj.value = self._version
        return 0

    def cuGetProcAddress_v2(self, name: Any, entry: Any, version: Any, flags: c_uint64, status: Any) -> int:  # noqa: N802 - the driver's name
        self.asked.append(version.value)
        if flags.value != 0 or version.value > self._version:
            return 1
        found = [since for since in self._entries if since <= version.value]
        is_there = bool(found) and name.value == b"cuMemcpyBatchAsync"
        entry._obj.value = ctypes.cast(self._entries[max(found)], c_void_p).value if is_there else None
        status._obj.value = 0 if is_there else 1
        return 0

    def _copy_12080(self, *arguments: int) -> int:
        *same, fault, stream = arguments
        code = self._copy_13000(*same, stream)
        c_size_t.from_address(fault).value = 1 if code else 0
        return code

    def _copy_13000(self, *arguments: int) -> int:
        targets, sources, sizes, count, attributes, firsts, num_attributes, stream = arguments
        columns = [(c_uint64 * count).from_address(column) for column in (targets, sources, sizes)]
        copies = list(zip(*columns, strict=True))
        number = len(self.calls)
        self.calls.append(copies)
        described = struct.unpack("=I iiii I", ctypes.string_at(attributes, 24))
        self.attributes.append((*described, c_size_t.from_address(firsts).value, num_attributes, stream))
        is_refused = self.refuse_from is not None and number >= self.refuse_from
        for target, source, num_bytes in copies[::-1][: 1 if is_refused else count]:  # no order among them is promised
            ctypes.memmove(target, source, num_bytes)
        return 1 if is_refused else 0


class CopierContract:
    """What holds for any copier."""

    device = "cpu"

    def open(self, kv: PagedKV) -> Copier:
        """A copier of ``kv``."""
        raise NotImplementedError

    @pytest.fixture
    def opened(self) -> Iterator[Callable[[PagedKV], Copier]]:
        """``open``, and a close for each."""
        copiers: list[Copier] = []

        def opened(kv: PagedKV) -> Copier:
            copiers.append(self.open(kv))
            return copiers[-1]

        yield opened
        for copier in copiers:
            copier.close()

    def pages(self, axes: str, seed: int = 1, *, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Pages:
        """Filled pages on the copier's device; ``more`` is as for ``Pages``."""
        return Pages(axes, seed, dtype=dtype, device=self.device, **more)

    def slots(self, kv: PagedKV, num_slots: int, gap_bytes: int = 0) -> Slots:
        """Slots that the copier's device reaches."""
        return Slots(kv, num_slots, gap_bytes)

    def computed(self, compute: Callable[[], Tensor]) -> Tensor:
        """What ``compute`` returns when the device does it, after what its current stream waits for."""
        return compute()

    @pytest.mark.parametrize("axes", [*IN_ORDER, *STRIDED, MLA])
    @pytest.mark.parametrize(("pages_per_block", "gap_bytes"), [(1, 64), (2, 0), (4, 64)])
    def test_an_offloaded_block_is_in_the_layouts_order(
        self, opened: Callable[[PagedKV], Copier], axes: str, pages_per_block: int, gap_bytes: int
    ) -> None:
        engine = self.pages(axes, pages_per_block=pages_per_block)
        slots = self.slots(engine.kv, 2, gap_bytes)
        pages = [7, 2, 3, 4, 5, 0, 1, 8][: 2 * pages_per_block]
        finish(opened(engine.kv).offload(pages, slots.views))
        blocks = [pages[:pages_per_block], pages[pages_per_block:]]
        assert [bytes(view) for view in slots.views] == [engine.block(block) for block in blocks]
        assert slots.guards() <= {GUARD}

    @pytest.mark.parametrize("written", ["page plane head token dim", IN_ORDER[0], IN_ORDER[3]])
    @pytest.mark.parametrize(("read", "dtype"), list(zip([*IN_ORDER, *STRIDED], cycle(DTYPES), strict=False)))
    def test_a_block_of_one_arrangement_is_read_exactly_into_another(
        self, opened: Callable[[PagedKV], Copier], written: str, read: str, dtype: torch.dtype
    ) -> None:
        """WK-047: heads outside tokens or inside, the key is the same and so are the bytes."""
        source = self.pages(written, 1, dtype=dtype, pages_per_block=2)
        target = self.pages(read, 2, dtype=dtype, pages_per_block=2)
        assert source.kv.layout == target.kv.layout
        slots = self.slots(source.kv, 2)
        finish(opened(source.kv).offload([8, 1, 2, 3], slots.views))
        finish(opened(target.kv).onboard(slots.views, [4, 5, 6, 0]))
        assert target.block([4, 5, 6, 0]) == source.block([8, 1, 2, 3])

    @pytest.mark.parametrize("degree", DEGREES)
    @pytest.mark.parametrize(
        ("written", "read", "num_heads", "dtype"),
        [
            (IN_ORDER[0], STRIDED[0], 8, torch.bfloat16),
            (STRIDED[1], IN_ORDER[3], 16, torch.float32),
            (BY_STRIPE, IN_ORDER[1], 8, torch.float8_e4m3fn),
            (STRIDED[2], BY_STRIPE, 24, torch.bfloat16),
        ],
    )
    def test_what_ranks_of_one_degree_wrote_those_of_another_read_exactly(
        self,
        opened: Callable[[PagedKV], Copier],
        degree: int,
        written: str,
        read: str,
        num_heads: int,
        dtype: torch.dtype,
    ) -> None:
        """WK-047: each rank has pages of its own heads, and of every block its stripes."""

        def ranks(degree: int, axes: str, seed: int) -> Iterator[tuple[slice, Pages, list[memoryview]]]:
            for rank in range(degree):
                heads = slice(rank * num_heads // degree, (rank + 1) * num_heads // degree)
                pages = self.pages(axes, seed, heads=heads, num_stripes=DEGREES[-1] // degree, **model)
                assert pages.kv.layout == layout.part(degree)
                yield heads, pages, [view[layout.bytes_of(rank, degree)] for view in slots.views]

        model: dict[str, Any] = {"dtype": dtype, "num_heads": num_heads, "pages_per_block": 2}
        whole = self.pages(written, 1, num_stripes=DEGREES[-1], **model)
        layout, slots = whole.kv.layout, self.slots(whole.kv, 2, 64)
        for _, source, parts in ranks(degree, written, 1):
            finish(opened(source.kv).offload([7, 2, 3, 5], parts))
        assert [bytes(view) for view in slots.views] == [whole.block([7, 2]), whole.block([3, 5])]
        assert slots.guards() <= {GUARD}
        for other in DEGREES:
            for heads, target, parts in ranks(other, read, 2):
                expected = target.content()
                expected[[1, 0, 4, 8]] = whole.content()[[7, 2, 3, 5]][..., heads, :]
                finish(opened(target.kv).onboard(parts, [1, 0, 4, 8]))
                assert target.content().view(torch.uint8).equal(expected.view(torch.uint8))

    @pytest.mark.parametrize("axes", [*IN_ORDER, *STRIDED, MLA])
    def test_an_onboard_touches_no_other_page(self, opened: Callable[[PagedKV], Copier], axes: str) -> None:
        engine = self.pages(axes)
        before = engine.content()
        slots = self.slots(engine.kv, 2)
        finish(opened(engine.kv).onboard(slots.views, [3, 5]))
        others = [0, 1, 2, 4, 6, 7, 8]
        assert engine.content()[others].view(torch.uint8).equal(before[others].view(torch.uint8))
        assert engine.block([3]) + engine.block([5]) == bytes(slots.memory)

    @pytest.mark.parametrize(
        ("axes", "num_stripes"),
        [(IN_ORDER[0], 1), (IN_ORDER[3], 1), (STRIDED[0], 1), (BY_STRIPE, 2), (STRIDED[0], 2)],
    )
    def test_compute_after_wait_layer_finds_the_layer(
        self, opened: Callable[[PagedKV], Copier], axes: str, num_stripes: int
    ) -> None:
        source = self.pages(axes, 1, num_stripes=num_stripes)
        target = self.pages(axes, 2, num_stripes=num_stripes)
        slots = self.slots(source.kv, NUM_PAGES)
        finish(opened(source.kv).offload(range(NUM_PAGES), slots.views))
        ticket = started(opened(target.kv).onboard(slots.views, range(NUM_PAGES)))
        seen = []
        for layer in range(NUM_LAYERS):
            ticket.wait_layer(layer)
            stripes = target.kv.layers[layer::NUM_LAYERS]
            seen.append(self.computed(partial(torch.cat, stripes, dim=3)))
        finish(ticket)
        for layer, copied in enumerate(seen):
            assert copied.cpu().equal(source.content()[:, layer])

    @pytest.mark.parametrize(("axes", "name", "dtype", "num_stripes"), QUANTISED_PAGES)
    def test_a_quantised_block_has_scales_of_its_own_and_comes_back_layer_by_layer(
        self, opened: Callable[[PagedKV], Copier], axes: str, name: str, dtype: torch.dtype, num_stripes: int
    ) -> None:
        more: dict[str, Any] = {"pages_per_block": 2, "num_stripes": num_stripes, "quantisation": name}
        source, target = (self.pages(axes, seed, dtype=dtype, **more) for seed in (1, 2))
        slots = self.slots(source.kv, 2, 64)
        finish(opened(source.kv).offload([7, 2, 3, 5], slots.views))
        assert [bytes(view) for view in slots.views] == [source.block([7, 2]), source.block([3, 5])]
        assert slots.guards() <= {GUARD}
        expected = target.content()
        loaded = torch.stack([target.loaded(bytes(view)) for view in slots.views])
        by_page = loaded.view(*loaded.shape[:3], 2, -1, *loaded.shape[4:]).movedim(3, 1)
        expected[[1, 0, 4, 8]] = by_page.flatten(0, 1)
        ticket = started(opened(target.kv).onboard(slots.views, [1, 0, 4, 8]))
        for layer in range(NUM_LAYERS):
            ticket.wait_layer(layer)
            seen = self.computed(partial(torch.cat, target.kv.layers[layer::NUM_LAYERS], dim=3))
            assert seen.cpu().equal(expected[:, layer])
        finish(ticket)
        assert target.content().equal(expected)

    def test_whatever_memory_is_given_to_reach_the_bytes_are_the_same(
        self, opened: Callable[[PagedKV], Copier]
    ) -> None:
        engine = self.pages(STRIDED[0])
        slots, others = self.slots(engine.kv, 4), self.slots(engine.kv, 4)
        copier = opened(engine.kv)
        for memory in (slots.memory, None, others.memory, b"", slots.memory):
            copier.reach(None if memory is None else memoryview(memory))
            finish(copier.offload([7, 2, 5, 6], slots.views))
            finish(copier.offload([1, 3, 4, 0], others.views))
        assert bytes(slots.memory) == b"".join(engine.block([page]) for page in (7, 2, 5, 6))
        assert bytes(others.memory) == b"".join(engine.block([page]) for page in (1, 3, 4, 0))

    def test_nothing_is_a_copy_too(self, opened: Callable[[PagedKV], Copier]) -> None:
        copier = opened(self.pages(IN_ORDER[0]).kv)
        finish(copier.offload([], []))
        finish(copier.onboard([], []))

    @pytest.mark.parametrize("axes", [IN_ORDER[0], STRIDED[0]])
    @pytest.mark.parametrize("seed", range(2))
    def test_copies_that_touch_different_bytes_run_in_any_mix(
        self, opened: Callable[[PagedKV], Copier], axes: str, seed: int
    ) -> None:
        chance = random.Random(seed)
        engine = self.pages(axes)
        slots = self.slots(engine.kv, 6)
        in_pages = [engine.block([page]) for page in range(NUM_PAGES)]
        in_slots = [bytes(view) for view in slots.views]
        copier = opened(engine.kv)
        for _ in range(10):
            pages = chance.sample(range(NUM_PAGES), 6)
            order = chance.sample(range(6), 6)
            out, back = order[:3], order[3:]
            leaving = copier.offload(pages[:3], [slots.views[slot] for slot in out])
            coming = copier.onboard([slots.views[slot] for slot in back], pages[3:])
            finish(leaving)
            finish(coming)
            for page, slot in zip(pages, order, strict=True):
                if slot in out:
                    in_slots[slot] = in_pages[page]
                else:
                    in_pages[page] = in_slots[slot]
        assert [bytes(view) for view in slots.views] == in_slots
        assert [engine.block([page]) for page in range(NUM_PAGES)] == in_pages

    def test_what_does_not_fit_is_refused_and_touches_nothing(self, opened: Callable[[PagedKV], Copier]) -> None:
        engine = self.pages(IN_ORDER[0], pages_per_block=2)
        slots = self.slots(engine.kv, 2)
        copier = opened(engine.kv)
        before = engine.content()
        for pages, views in [
            ([0], slots.views[:1]),
            ([0, 1], slots.views),
            ([0, NUM_PAGES], slots.views[:1]),
            ([0, -1], slots.views[:1]),
            ([0, 1], [slots.views[0][:-1]]),
            ([0, 1], [memoryview(slots.memory)]),
        ]:
            with pytest.raises(LayoutError):
                copier.offload(pages, views)
            with pytest.raises(LayoutError):
                copier.onboard(views, pages)
        with pytest.raises(LayoutError):
            copier.offload([0, 1], [slots.views[0].toreadonly()])
        copier.close()
        assert set(slots.memory) == {GUARD}
        assert engine.content().equal(before)

    def test_a_slot_to_onboard_from_may_be_read_only(self, opened: Callable[[PagedKV], Copier]) -> None:
        engine = self.pages(IN_ORDER[0])
        slots = self.slots(engine.kv, 1)
        finish(opened(engine.kv).onboard([slots.views[0].toreadonly()], [3]))
        assert engine.block([3]) == bytes(slots.memory)

    def test_close_sees_copies_through_and_ends_the_copier(self, opened: Callable[[PagedKV], Copier]) -> None:
        engine = self.pages(IN_ORDER[0])
        slots = self.slots(engine.kv, NUM_PAGES)
        copier = opened(engine.kv)
        ticket = started(copier.offload(range(NUM_PAGES), slots.views))
        copier.close()
        assert ticket.done()
        assert bytes(slots.memory) == b"".join(engine.block([page]) for page in range(NUM_PAGES))
        copier.close()
        with pytest.raises(ClosedError):
            copier.offload([0], slots.views[:1])
        with pytest.raises(ClosedError):
            copier.onboard(slots.views[:1], [0])
