from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from sim_model import make_request

from ecotone.engine.kv_cache_manager import KVCacheManager
from ecotone.errors import IntegrityError


def test_blocks_cover_the_tokens_and_no_more():
    kv, a = KVCacheManager(num_blocks=4, block_size=3), make_request("a", 9)
    assert kv.allocate(a, 4)
    assert len(kv.get_block_ids(a)) == 2
    a.num_computed_tokens = 4
    assert kv.allocate(a, 2)  # 6 tokens still fit
    assert len(kv.get_block_ids(a)) == 2
    first = kv.get_block_ids(a)
    assert kv.allocate(a, 3)
    assert kv.get_block_ids(a)[:2] == first  # what is stored stays where it is
    assert kv.num_free_blocks == 1


def test_all_or_nothing():
    kv, a, b = KVCacheManager(num_blocks=3, block_size=2), make_request("a", 9), make_request("b", 9)
    assert kv.allocate(a, 4)
    assert not kv.can_allocate(b, 3)
    assert not kv.allocate(b, 3)
    assert kv.get_block_ids(b) == ()
    assert kv.owners() == {"a"}
    assert kv.can_allocate(b, 2)
    assert kv.allocate(b, 2)
    kv.check_integrity()


def test_freeing_twice_changes_nothing():
    kv, a, b = KVCacheManager(num_blocks=3, block_size=2), make_request("a", 9), make_request("b", 9)
    kv.allocate(a, 4)
    kv.free(a)
    kv.allocate(b, 6)
    kv.free(a)
    assert kv.num_free_blocks == 0
    assert sorted(kv.get_block_ids(b)) == [0, 1, 2]
    kv.check_integrity()


def test_a_lost_block_is_found(monkeypatch):
    kv, a = KVCacheManager(num_blocks=3, block_size=2), make_request("a", 9)
    kv.allocate(a, 4)
    kv.num_blocks = 1
    with pytest.raises(IntegrityError, match="2 of 1 blocks"):
        kv.check_integrity()
    kv.num_blocks = 3
    monkeypatch.setattr(kv, "_blocks", {})
    with pytest.raises(IntegrityError, match="2 of 3 blocks were used, but free and owned are \\[\\]"):
        kv.check_integrity()


def test_a_store_costs_what_is_used_of_it():
    kv, a = KVCacheManager(num_blocks=10**30, block_size=2), make_request("a", 9)
    assert kv.allocate(a, 4)
    assert kv.get_block_ids(a) == (0, 1)
    assert kv.num_free_blocks == 10**30 - 2
    kv.free(a)
    assert kv.num_free_blocks == 10**30
    kv.check_integrity()


@given(
    num_blocks=st.integers(1, 8),
    block_size=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=30),
)
def test_against_a_plain_count(num_blocks, block_size, actions):
    """``0`` frees; anything else computes so many tokens more, if there is room."""
    kv = KVCacheManager(num_blocks, block_size)
    requests = {name: make_request(name, 1) for name in "abc"}
    for name, num_tokens in actions:
        request = requests[name]
        if num_tokens == 0:
            kv.free(request)
            request.num_computed_tokens = 0
            continue
        others = sum(-(-r.num_computed_tokens // block_size) for r in requests.values() if r is not request)
        fits = others + -(-(request.num_computed_tokens + num_tokens) // block_size) <= num_blocks
        assert kv.can_allocate(request, num_tokens) == fits
        assert kv.allocate(request, num_tokens) == fits
        request.num_computed_tokens += num_tokens * fits
        kv.check_integrity()
        for r in requests.values():
            assert len(kv.get_block_ids(r)) == -(-r.num_computed_tokens // block_size)
