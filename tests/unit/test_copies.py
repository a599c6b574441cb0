"""Copies that return out of turn: what they bring is entered root first, whatever the threads did."""

from tests.worlds import World, world


def put_in_tickets(w: World, chain_length: int, first_token: int, *, turns: tuple[int, ...]) -> None:
    """Store a chain two blocks at a time, each step's copy a ticket of its own, which return in these turns."""
    chain = w.chain(chain_length, first_token=first_token)
    for end in range(2, chain_length + 1, 2):
        w.put(chain[:end])
    waiting = list(range(chain_length // 2))
    for turn in turns:
        w.steps.lanes["file"].step(waiting.index(turn))
        waiting.remove(turn)
        w.store.poll()


def num_on_file(w: World) -> float:
    return w.store.snapshot()["kvstore_blocks"]["file",]


def test_a_copy_counts_when_those_above_it_do() -> None:
    with world(memory=6, file=6) as w:
        put_in_tickets(w, 6, 0, turns=(2, 1))
        assert num_on_file(w) == 0
        w.settle()
        assert num_on_file(w) == 6
        w.assert_idle()


def test_a_copy_does_not_wait_for_one_that_is_given_up() -> None:
    with world(memory=4, file=4) as w:
        put_in_tickets(w, 4, 0, turns=(1,))
        assert num_on_file(w) == 0
        w.clock.advance(60)
        w.store.poll()
        assert num_on_file(w) == 2
        w.settle()
        w.assert_idle()


def test_blocks_that_were_written_out_of_turn_leave_before_newer_ones() -> None:
    with world(memory=8, file=8) as w:
        put_in_tickets(w, 6, 0, turns=(0, 2, 1))
        put_in_tickets(w, 2, 100, turns=(0,))
        w.settle()
        put_in_tickets(w, 4, 200, turns=(0, 1))
        w.settle()
        w.store.evict(8)
        assert w.store.lookup(w.chain(6)).found == 2
        assert w.store.lookup(w.chain(2, first_token=100)).found == 2
        assert w.store.lookup(w.chain(4, first_token=200)).found == 4
