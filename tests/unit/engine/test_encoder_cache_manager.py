from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_model import make_request

from ecotone.engine.encoder_cache_manager import EncoderCacheManager
from ecotone.engine.request import Request
from ecotone.errors import ContractError, IntegrityError

ROWS = {"u": 1, "v": 2, "w": 3, "x": 4, "y": 5}


def request(name: str, *items: str) -> Request:
    return make_request(name, items, rows=ROWS)


def test_held_until_nobody_needs_it_and_then_until_room_is_needed():
    manager, a, b = EncoderCacheManager(9), request("a", "x"), request("b", "y", "u")
    manager.allocate(a, 0)
    assert manager.is_cached("0:x")
    assert manager.num_available_rows == 5
    manager.free_encoder_input(a, 0)
    assert manager.is_cached("0:x")
    assert (manager.num_used_rows, manager.num_available_rows) == (4, 9)
    manager.allocate(b, 0)
    assert manager.get_freed_keys() == ()
    manager.allocate(b, 1)
    assert manager.get_freed_keys() == ("0:x",)
    assert manager.num_evictions == 1


def test_least_recently_freed_goes_first():
    manager, a = EncoderCacheManager(6), request("a", "u", "v", "w")
    for index in range(3):
        manager.allocate(a, index)
    for index in (1, 0, 2):
        manager.free_encoder_input(a, index)
    assert manager.check_and_update_cache(a, 1)  # v is needed again, so u is next
    manager.free_encoder_input(a, 1)
    manager.allocate(request("b", "u"), 0)  # held: nothing goes
    assert manager.get_freed_keys() == ()
    manager.allocate(request("c", "x"), 0)
    assert manager.get_freed_keys() == ("0:w", "0:v")


def test_same_image_twice_is_two_references_to_one_entry():
    manager, a = EncoderCacheManager(5), request("a", "x", "u", "x")
    manager.allocate(a, 0)
    assert manager.rows_to_claim("0:x", 4) == 0
    assert manager.check_and_update_cache(a, 2)
    assert manager.num_used_rows == 4
    manager.free_encoder_input(a, 0)
    assert manager.num_available_rows == 1  # the second occurrence still needs it
    with pytest.raises(ContractError, match="2 encoder rows allocated where 1 are available"):
        manager.allocate(request("b", "v"), 0)
    manager.free_encoder_input(a, 2)
    assert manager.num_available_rows == 5


def test_freeing_twice_changes_nothing():
    manager, a, b = EncoderCacheManager(9), request("a", "x", "x"), request("b", "x")
    manager.allocate(a, 0)
    manager.check_and_update_cache(b, 0)
    for _ in range(2):
        manager.free_encoder_input(a, 0)
        manager.free_encoder_input(a, 1)
        manager.free(a)
        manager.check_integrity()
    assert manager.owners() == {"b"}
    assert manager.num_available_rows == 5


def test_a_key_evicted_and_allocated_again_in_one_pass_is_not_announced():
    manager, a, b = EncoderCacheManager(5), request("a", "y"), request("b", "x")
    manager.allocate(a, 0)
    manager.free(a)
    manager.allocate(b, 0)  # y goes
    assert not manager.is_cached("0:y")
    manager.free(b)
    manager.allocate(a, 0)  # x goes, y is there again
    assert manager.get_freed_keys() == ("0:x",)
    assert manager.get_freed_keys() == ()


def test_dropping_takes_it_from_all_who_reference_it():
    manager, a, b = EncoderCacheManager(9), request("a", "x", "u"), request("b", "x")
    manager.allocate(a, 0)
    manager.allocate(a, 1)
    manager.check_and_update_cache(b, 0)
    manager.drop("0:x")
    manager.drop("0:x")
    manager.drop("never seen")
    assert manager.has_notices
    assert not manager.check_and_update_cache(b, 0)
    assert manager.get_cached_input_ids(a) == {1}
    assert manager.get_cached_input_ids(b) == frozenset()
    manager.free(b)
    assert manager.get_freed_keys() == ("0:x",)
    assert not manager.has_notices
    manager.check_integrity()


def test_reset_forgets_everything_and_says_so_once():
    manager, a = EncoderCacheManager(9), request("a", "x", "u")
    manager.allocate(a, 0)
    manager.allocate(a, 1)
    manager.free_encoder_input(a, 1)
    manager.reset()
    assert manager.num_used_rows == 0
    assert manager.owners() == set()
    assert sorted(manager.get_freed_keys()) == ["0:u", "0:x"]
    assert manager.get_freed_keys() == ()
    manager.check_integrity()


def test_one_key_has_one_number_of_rows():
    manager = EncoderCacheManager(9)
    manager.allocate(request("a", "x"), 0)
    other = make_request("b", ["x"], rows={"x": 3})
    with pytest.raises(ContractError, match="0:x names 4 encoder rows and 3"):
        manager.check_and_update_cache(other, 0)
    manager.check_integrity()


def test_books_that_do_not_add_up_are_found():
    manager, a = EncoderCacheManager(9), request("a", "x")
    manager.allocate(a, 0)
    manager.cache_size = 3
    with pytest.raises(IntegrityError, match="more rows are held than there are"):
        manager.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """The manager beside a worker's dict that does what it is told at the end of each pass."""

    @initialize(capacity=st.integers(5, 12))
    def build(self, capacity):
        self.manager = EncoderCacheManager(capacity)
        self.worker: dict[str, int] = {}
        self.orders: dict[str, int] = {}
        self.referenced: dict[tuple[str, int], str] = {}
        self.scheduled: set[str] = set()  # who got something in this pass; the step runs for them whatever happens
        self.requests = {
            name: request(name, *items) for name, items in (("a", "uvwxy"), ("b", "xxyu"), ("c", "vvv"))
        }

    @rule(name=st.sampled_from("abc"), index=st.integers(0, 4))
    def need(self, name, index):
        """An occurrence comes to be computed: a hit, an order, or no room."""
        request = self.requests[name]
        index %= len(request.items)
        key, rows = request.item_keys[index], request.items[index].num_rows
        available = self.manager.num_available_rows
        claim = self.manager.rows_to_claim(key, rows)
        assert claim == (0 if key in self.referenced.values() else rows)
        if claim > available:
            if not self.manager.is_cached(key):
                with pytest.raises(ContractError):
                    self.manager.allocate(request, index)
            return
        if not self.manager.check_and_update_cache(request, index):
            self.manager.allocate(request, index)
            self.orders[key] = rows
        self.referenced[name, index] = key
        self.scheduled.add(name)
        assert self.manager.num_available_rows == available - claim

    @rule(name=st.sampled_from("abc"), index=st.integers(0, 4))
    def computed(self, name, index):
        if name not in self.scheduled:
            index %= len(self.requests[name].items)
            self.manager.free_encoder_input(self.requests[name], index)
            self.referenced.pop((name, index), None)

    @rule(name=st.sampled_from("abc"))
    def ended(self, name):
        """Finished between passes, or preempted within one before it got anything."""
        if name not in self.scheduled:
            self.manager.free(self.requests[name])
            self.referenced = {ref: key for ref, key in self.referenced.items() if ref[0] != name}

    @rule(lost=st.sets(st.sampled_from(sorted(ROWS))), reset=st.sampled_from([False, False, False, True]))
    def end_pass(self, lost, reset):
        """The step runs; some loads fail, or the cache is reset after it."""
        freed = self.manager.get_freed_keys()
        assert len(set(freed)) == len(freed)
        assert not any(self.manager.is_cached(key) for key in freed)
        for key in freed:
            self.worker.pop(key, None)
        kept = {key: rows for key, rows in self.worker.items() if key not in self.orders}
        assert sum(kept.values()) <= self.manager.cache_size
        self.worker |= self.orders
        assert sum(self.worker.values()) <= self.manager.cache_size
        for key in {f"0:{item}" for item in lost} & self.orders.keys():
            del self.worker[key]
            self.manager.drop(key)
            self.referenced = {ref: k for ref, k in self.referenced.items() if k != key}
        self.orders.clear()
        self.scheduled.clear()
        if reset:
            self.manager.reset()
            self.referenced.clear()

    @invariant()
    @precondition(lambda self: hasattr(self, "manager"))
    def what_is_said_to_be_held_is_held(self):
        self.manager.check_integrity()
        for key in (f"0:{item}" for item in ROWS):
            if self.manager.is_cached(key):
                assert key in self.worker or key in self.orders
            if key in self.referenced.values():
                assert self.manager.is_cached(key)
        for name, request in self.requests.items():
            assert self.manager.get_cached_input_ids(request) == {i for n, i in self.referenced if n == name}
        held = sum(rows for item, rows in ROWS.items() if self.manager.is_cached(f"0:{item}"))
        assert held == self.manager.num_used_rows


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
