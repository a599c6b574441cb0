"""The connector under vLLM's own schedulers: what is offered, loaded, held and given back."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.vllm.engine import TRANSFER
from tests.vllm.prompts import PAGE_TOKENS
from tests.vllm.runner import Runner, answer_to

STORE = {"memory": {"capacity": "16MiB"}}
PROMPT = list(range(1, 6 * PAGE_TOKENS + 1))
NOTHING_HELD = {"requests": 0, "copies": 0, "pages": 0, "pins": 0}
Make = Callable[..., Runner]
Windows = tuple[int | None, ...]
of_groups = pytest.mark.parametrize("windows", [(None,), (None, 40, 40), (40,), (70, None, None)])
"""Models without groups, as Gemma 3, with nothing but windows, with windows between two kinds of full attention."""


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    """Runners, closed afterwards."""
    made = []

    def one(store: dict[str, Any] | None = None, *, num_pages: int = 64, **options: Any) -> Runner:
        made.append(Runner(model, store or STORE, num_pages=num_pages, **options))
        return made[-1]

    yield one
    for runner in made:
        runner.close()


def served(runner: Runner) -> int:
    """Tokens that the store gave, of this and every earlier request."""
    return sum(count for name, count in runner.counts.items() if name.startswith("tokens_from_"))


@of_groups
@pytest.mark.parametrize("is_async", [False, True])
def test_a_whole_prompt_is_loaded_but_for_its_last_token(make: Make, is_async: bool, windows: Windows) -> None:
    runner = make(is_async=is_async, windows=windows)
    for name in ("cold", "warm"):
        runner.add(name, PROMPT)
        runner.run()
        assert runner.tokens[name] == answer_to(PROMPT, 8)
        assert runner.held() == NOTHING_HELD
        assert runner.scheduler.reset_prefix_cache()
    assert served(runner) == 5 * PAGE_TOKENS


@of_groups
def test_what_vllm_has_itself_is_not_loaded(make: Make, windows: Windows) -> None:
    runner = make(windows=windows)
    runner.add("cold", PROMPT)
    runner.run()
    runner.add("warm", PROMPT)
    runner.run()
    assert served(runner) == 0
    assert runner.held() == NOTHING_HELD


def test_a_request_has_one_pin_and_one_answer(make: Make) -> None:
    runner = make()
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    runner.add("warm", PROMPT)
    (request,) = runner.scheduler.requests.values()
    connector = runner.scheduler.connector
    answers = {connector.get_num_new_matched_tokens(request, 0) for _ in range(3)}
    assert answers == {(5 * PAGE_TOKENS, True)}
    assert runner.held()["pins"] == 5
    assert connector.get_num_new_matched_tokens(request, 2 * PAGE_TOKENS) == (3 * PAGE_TOKENS, True)
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 8)


@of_groups
def test_a_pin_ends_at_its_deadline_and_is_taken_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, windows: Windows
) -> None:
    monkeypatch.setattr("connectors.vllm.scheduler_half.PIN_S", 0.0)
    runner = make(windows=windows)
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    runner.add("warm", PROMPT)
    (request,) = runner.scheduler.requests.values()
    assert runner.half.offer(request, 0) == 5 * PAGE_TOKENS
    runner.half.build({})
    assert runner.held()["pins"] == 0
    assert runner.half.offer(request, 0) == 5 * PAGE_TOKENS
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 8)
    assert served(runner) == 5 * PAGE_TOKENS


def test_a_load_that_fails_is_computed_and_not_offered_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make()
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    monkeypatch.setattr("connectors.vllm.worker_half.ArenaView", _refuse)
    runner.worker._worker._arenas.clear()
    runner.add("warm", PROMPT)
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 8)
    assert runner.num_failed_pages == 5
    assert runner.counts["failed_loads"] == 1
    assert runner.held() == NOTHING_HELD


@of_groups
def test_a_load_whose_lease_is_lost_is_computed(make: Make, windows: Windows) -> None:
    runner = make(windows=windows)
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    pin = runner.half.store.pin

    def lose(chain: Any) -> Any:
        lease = pin(chain)
        lease.still_held = lambda: False
        return lease

    runner.half.store.pin = lose
    runner.add("warm", PROMPT)
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 8)
    assert (runner.num_failed_pages, runner.num_failed_loads) == ((5, 0) if windows == (None,) else (0, 1))
    assert served(runner) == 0
    assert runner.held() == NOTHING_HELD


@pytest.mark.parametrize("is_async", [False, True])
def test_any_beginning_of_a_prompt_is_served_although_windows_have_moved_on(make: Make, is_async: bool) -> None:
    """A step computes more than a window: what leaves it is stored before vLLM hands the page to somebody else."""
    runner = make(is_async=is_async, windows=(None, 40, 40))
    runner.add("cold", PROMPT)
    runner.run()
    for num_blocks in range(1, 6):
        runner.scheduler.reset_prefix_cache()
        prompt, before = PROMPT[: num_blocks * PAGE_TOKENS] + [400 + num_blocks] * PAGE_TOKENS, served(runner)
        runner.add("other", prompt)
        runner.run()
        assert runner.tokens["other"] == answer_to(prompt, 8)
        assert served(runner) - before == num_blocks * PAGE_TOKENS
    assert runner.held() == NOTHING_HELD


def test_of_a_window_only_what_it_reads_is_loaded(make: Make) -> None:
    runner = make(windows=(None, 40, 90))
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    runner.add("warm", PROMPT)
    loads = {load.group: len(load.pages) for load in runner.scheduler.schedule().kv_connector_metadata.loads}
    assert loads == {0: 5, 1: 2, 2: 3}
    assert runner.held()["pins"] == 5 + 2 + 3


def test_a_block_that_a_window_lacks_ends_the_hit_before_it(make: Make) -> None:
    """The longest hit for which every group has what it needs, and what follows is stored again."""
    runner = make(windows=(None, 40))
    runner.add("cold", PROMPT)
    runner.run()
    space = runner.scheduler.connector._namespaces[""][1]
    (level,) = runner.half.store.slot_levels
    for lost, hit in ((3, 3), (1, 5), (4, 4), (0, 5)):
        runner.scheduler.reset_prefix_cache()
        runner.add("warm", PROMPT)
        level.pool(space.fingerprint).remove(space.key(runner.scheduler.requests["warm"].block_hashes[lost]))
        before = served(runner)
        runner.run()
        assert runner.tokens["warm"] == answer_to(PROMPT, 8)
        assert served(runner) - before == hit * PAGE_TOKENS, f"without block {lost}"
    assert runner.held() == NOTHING_HELD


def test_a_load_that_fails_in_one_group_is_computed_from_the_first_token_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages vLLM cannot be told where there are several groups, and would be wrong about those of a window."""
    for windows in ((None, 40), (40,)):
        runner = make(windows=windows)
        runner.add("cold", PROMPT)
        runner.run()
        runner.scheduler.reset_prefix_cache()
        last = runner.worker._worker._copiers[-1]
        with monkeypatch.context() as broken:
            broken.setattr(last, "onboard", _refuse)
            runner.add("warm", PROMPT)
            runner.run()
        assert runner.tokens["warm"] == answer_to(PROMPT, 8)
        assert (runner.num_failed_loads, runner.num_failed_pages, served(runner)) == (1, 0, 0)
        assert runner.counts["failed_loads"] == 1
        assert runner.held() == NOTHING_HELD


def test_a_load_is_over_when_every_group_has_its_part(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(windows=(None, 40))
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    worker = runner.worker._worker
    last = worker._copiers[-1]
    onboard = last.onboard

    def onboard_later(*arguments: Any) -> Any:
        return None if worker._copies else onboard(*arguments)  # not before the other part is there

    monkeypatch.setattr(last, "onboard", onboard_later)
    runner.add("warm", PROMPT, max_tokens=1)
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 1)
    assert served(runner) == 5 * PAGE_TOKENS


def test_pages_that_left_a_window_before_there_was_room_are_not_stored(make: Make) -> None:
    runner = make(windows=(None, 40))
    store = runner.half.store
    reserve = store.reserve
    store.reserve = lambda ns, _: reserve(ns, 0)
    runner.add("cold", PROMPT)
    runner.step()
    store.reserve = reserve
    runner.run()
    found = []
    for num_blocks in range(1, 6):
        runner.scheduler.reset_prefix_cache()
        prompt, before = PROMPT[: num_blocks * PAGE_TOKENS] + [400 + num_blocks] * PAGE_TOKENS, served(runner)
        runner.add("other", prompt, kv_transfer_params={"kvstore": {"store": False}})
        runner.run()
        assert runner.tokens["other"] == answer_to(prompt, 8)
        found.append((served(runner) - before) // PAGE_TOKENS)
    assert found == [0, 0, 0, 4, 5]
    assert runner.held() == NOTHING_HELD


@of_groups
def test_what_vllm_lacks_of_what_it_had_is_loaded(make: Make, windows: Windows) -> None:
    """The head of the prompt is vLLM's, the rest comes from the store, into windows that reach back to both."""
    runner = make(windows=windows)
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    runner.add("head", PROMPT[: 3 * PAGE_TOKENS + 1], kv_transfer_params={"kvstore": {"store": False}})
    runner.run()
    before = served(runner)
    runner.add("warm", PROMPT)
    runner.run()
    assert runner.tokens["warm"] == answer_to(PROMPT, 8)
    assert served(runner) - before == 2 * PAGE_TOKENS
    assert runner.held() == NOTHING_HELD


@of_groups
def test_reset_forgets_in_every_tier(make: Make, windows: Windows) -> None:
    runner = make(windows=windows)
    for name in ("cold", "colder"):
        runner.add(name, PROMPT)
        runner.run()
        assert runner.scheduler.reset_prefix_cache(reset_connector=True)
    assert served(runner) == 0


@of_groups
@pytest.mark.parametrize("is_async", [False, True])
def test_weights_that_change_in_place_make_nothing_for_those_on_disk(
    make: Make, tmp_path: Path, is_async: bool, windows: Windows
) -> None:
    """WK-017: vLLM resets before that, and has what runs compute all of it once more. A restart reads the disk."""
    store = {**STORE, "file": {"directories": [str(tmp_path)], "capacity": "16MiB"}}
    runner = make(store, is_async=is_async, windows=windows)
    runner.add("running", PROMPT, max_tokens=40)
    while len(runner.tokens["running"]) < 3 or runner.half.has_work:
        runner.step()
    runner.apply()
    runner.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    runner.weights += 1
    runner.run()
    assert runner.tokens["running"] == answer_to(PROMPT, 40)
    for name, num_blocks in (("cold", 0), ("warm", 5)):
        runner.scheduler.reset_prefix_cache()
        runner.add(name, PROMPT)
        runner.run()
        assert served(runner) == num_blocks * PAGE_TOKENS
    assert runner.held() == NOTHING_HELD
    runner.close()
    restarted = make(store, is_async=is_async, windows=windows)
    restarted.add("cold", PROMPT)
    restarted.run()
    assert served(restarted) == 0


@of_groups
@pytest.mark.parametrize("is_async", [False, True])
def test_no_request_in_line_is_given_kv_of_the_weights_before(make: Make, is_async: bool, windows: Windows) -> None:
    runner = make(is_async=is_async, windows=windows)
    runner.add("cold", PROMPT)
    runner.run()
    runner.scheduler.reset_prefix_cache()
    for name in ("loading", "waiting"):
        runner.add(name, PROMPT)
        if name == "loading":
            runner.step()
            assert runner.half._loads
    runner.scheduler.reset_prefix_cache(reset_connector=True)
    runner.weights += 1
    runner.run()
    for name in ("loading", "waiting"):
        assert runner.tokens[name] == answer_to(PROMPT, 8)
    assert served(runner) == 0
    assert runner.held() == NOTHING_HELD


def test_what_is_not_to_be_stored_is_not(make: Make) -> None:
    runner = make()
    for name in ("cold", "colder"):
        runner.add(name, PROMPT, kv_transfer_params={"kvstore": {"store": False}})
        runner.run()
        runner.scheduler.reset_prefix_cache()
    assert served(runner) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_two_stores_under_vllms_multi_connector(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    """Both are given what is computed, one is loaded from, and what the first has forgotten the second loads."""
    file = {"file": {"directories": [str(tmp_path)], "capacity": "16MiB"}}
    children = [{**TRANSFER, "kv_connector_extra_config": extra} for extra in (STORE, {**STORE, **file})]
    multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    runner = make(transfer={**multi, "kv_connector_extra_config": {"connectors": children}}, is_async=is_async)
    first, second = runner.scheduler.connector._connectors
    caplog.set_level("INFO", logger="vllm.kvstore")
    for name, num_loads in (("cold", 0), ("warm", 1), ("warm in the second", 2)):
        runner.add(name, PROMPT)
        runner.run()
        assert runner.tokens[name] == answer_to(PROMPT, 8)
        assert sum("160 from memory" in record.getMessage() for record in caplog.records) == num_loads
        runner.scheduler.reset_prefix_cache()
        if name == "warm":
            assert first.reset_cache()
    for child in (first, second):
        assert not child._scheduler._requests
        assert not child._scheduler.has_work
    pool = runner.scheduler.kv_cache_manager.block_pool
    assert not sum(page.ref_cnt for page in pool.blocks if not page.is_null)


def test_an_image_without_a_hash_is_not_taken_for_another(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """WK-021: placeholder tokens are the same for every image, so that only a hash tells them apart."""
    runner = make()
    # As if the encoder had seen every image: there is none.
    monkeypatch.setattr(runner.scheduler.encoder_cache_manager, "check_and_update_cache", lambda *_: True)
    found = []
    for number, content in enumerate(("cat", "cat", "dog", "dog", "", "")):
        place = PlaceholderRange(offset=0, length=PAGE_TOKENS)
        before = served(runner)
        runner.add(f"r{number}", PROMPT, mm_features=[MultiModalFeatureSpec(None, "image", content, place)])
        runner.run()
        runner.scheduler.reset_prefix_cache()
        found.append(served(runner) - before)
    assert found == [0, 5 * PAGE_TOKENS, 0, 5 * PAGE_TOKENS, 0, 0]
    assert runner.held() == NOTHING_HELD


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_that_hold_all_pages_do_not_wait_behind_one_that_needs_more(make: Make, is_async: bool) -> None:
    """HG-009: what has arrived is taken note of wherever its request stands in line."""
    runner = make(num_pages=14, is_async=is_async)
    prompts = {name: [value] * (4 * PAGE_TOKENS + 1) for name, value in (("a", 1), ("b", 2), ("c", 3))}
    for name, prompt in prompts.items():
        runner.add(f"cold {name}", prompt, max_tokens=1)
        runner.run()
        runner.scheduler.reset_prefix_cache()
    runner.add("b", prompts["b"])
    runner.add("c", prompts["c"])
    runner.step()
    assert len(runner.half._loads) == 2
    prompts["big"] = [4] * (10 * PAGE_TOKENS)
    runner.add("big", prompts["big"])
    big = runner.scheduler.requests["big"]
    runner.scheduler.waiting.remove_request(big)
    runner.scheduler.waiting.prepend_request(big)
    runner.run()
    for name in ("b", "c", "big"):
        assert runner.tokens[name] == answer_to(prompts[name], 8)
    assert runner.held() == NOTHING_HELD


@of_groups
@pytest.mark.parametrize("is_async", [False, True])
def test_a_session_that_drops_its_last_token_does_not_store_under_the_key_of_it(
    make: Make, is_async: bool, windows: Windows
) -> None:
    """Streaming input: the token that completed a block is not computed, and another takes its place."""
    runner = make(is_async=is_async, windows=windows)
    runner.add("session", PROMPT[: 2 * PAGE_TOKENS - 3], max_tokens=3, resumable=True)
    runner.run_session("session")
    dropped = PROMPT[: 2 * PAGE_TOKENS - 3] + runner.tokens["session"]
    assert len(dropped) == 2 * PAGE_TOKENS
    # Whatever makes vLLM ask now, the key of the second block is known from here on.
    runner.scheduler.connector.get_num_new_matched_tokens(runner.scheduler.requests["session"], 0)
    said = runner.say_more("session", [499] * 2 * PAGE_TOKENS)
    runner.run_session("session")
    assert runner.tokens["session"] == answer_to(said, 8)
    runner.abort("session")
    runner.run()
    for name, prompt in (("dropped", dropped + [3] * PAGE_TOKENS), ("said", said)):
        runner.scheduler.reset_prefix_cache()
        runner.add(name, prompt)
        runner.run()
        assert runner.tokens[name] == answer_to(prompt, 8)
    assert served(runner) == (1 + 3) * PAGE_TOKENS
    assert runner.held() == NOTHING_HELD


@of_groups
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_requests_come_go_are_preempted_and_aborted(
    make: Make, monkeypatch: pytest.MonkeyPatch, seed: int, is_async: bool, windows: Windows
) -> None:
    """Few pages, a small store, aborts in every state: no wrong KV is ever attended to, and nothing is left."""
    monkeypatch.setattr("kvstore.extents.MIN_EXTENT_BYTES", 64 << 10)  # each group has extents of its own
    dice = random.Random(seed)
    capacity = f"{256 * len(windows)}KiB"
    num_pages = {(None,): 18, (None, 40, 40): 22, (40,): 8, (70, None, None): 36}[windows]
    runner = make({"memory": {"capacity": capacity}}, num_pages=num_pages, is_async=is_async, windows=windows)
    living: list[str] = []
    prompts = {}
    for number in range(60):
        name = f"r{number}"
        stem = [dice.randrange(3) + 1] * (PAGE_TOKENS * dice.randrange(1, 5))
        prompts[name] = stem + [dice.randrange(4) + 1] * dice.randrange(1, 3 * PAGE_TOKENS)
        runner.add(name, prompts[name], max_tokens=dice.choice((1, 8, 40)))
        living.append(name)
        for _ in range(dice.randrange(12)):
            runner.step()
        if dice.random() < 0.25:
            runner.abort(dice.choice(living))
        if dice.random() < 0.3:
            runner.scheduler.reset_prefix_cache()
    runner.run()
    for name in living:
        assert runner.tokens[name] == answer_to(prompts[name], len(runner.tokens[name]))
    assert served(runner) > 0
    # With windows a request gives pages back itself, so that it depends on the copies whether any is preempted.
    assert runner.num_preempted > 0 or windows != (None,)
    assert runner.held() == NOTHING_HELD
    runner.half.store.check()


def _refuse(*_: Any) -> Any:
    raise OSError("no arena")
