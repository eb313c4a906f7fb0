"""Eviction policies: their order, and their bounds."""

from __future__ import annotations

import random

import pytest

from ecotone.errors import ConfigError
from ecotone.node import Candidate, EvictionPolicy, make_policy
from ecotone.node.eviction import SECONDS_PER_BYTE, GreedyDualSizeFrequency


def drain(policy: EvictionPolicy) -> list[Candidate]:
    order = []
    while list(policy.candidates()):
        order.append(policy.victim())
        policy.remove(order[-1])
    return order


def test_lru_evicts_who_was_released_longest_ago() -> None:
    policy = make_policy("lru")
    a, b, c = (Candidate(64, None) for _ in range(3))
    for candidate in (a, b, c):
        policy.add(candidate)
    policy.remove(a)  # pinned, and released again
    policy.add(a)
    assert drain(policy) == [b, c, a]


def test_gdsf_evicts_where_least_is_lost_per_byte() -> None:
    policy = make_policy("gdsf")
    cheap, dear, large = Candidate(100, 1.0), Candidate(100, 5.0), Candidate(1000, 5.0)
    for candidate in (dear, large, cheap):
        policy.add(candidate)
    assert drain(policy) == [large, cheap, dear]


def test_gdsf_counts_uses() -> None:
    policy = make_policy("gdsf")
    often, seldom = Candidate(100, 1.0), Candidate(100, 2.0)
    often.uses = 3
    policy.add(often)
    policy.add(seldom)
    assert drain(policy) == [seldom, often]


def test_gdsf_moves_an_entry_that_was_hit_while_it_had_its_place() -> None:
    policy = make_policy("gdsf")
    hit, other = Candidate(100, 1.0), Candidate(100, 2.0)
    policy.add(hit)
    policy.add(other)
    policy.remove(hit)
    hit.uses += 2
    policy.add(hit)
    assert drain(policy) == [other, hit]


def test_gdsf_ages_so_that_what_was_popular_long_ago_goes_in_the_end() -> None:
    policy = make_policy("gdsf")
    old = Candidate(1, 1.0)
    old.uses = 10
    policy.add(old)
    evicted = []
    for _ in range(20):
        policy.add(Candidate(1, 1.0))
        evicted.append(policy.victim())
        policy.remove(evicted[-1])
    # The clock advances by 1 with each eviction: after nine of them, ten uses are worth no more than a new one.
    assert evicted.index(old) == 9


def test_equal_priorities_go_in_the_order_they_came() -> None:
    policy = make_policy("gdsf")
    several = [Candidate(64, None) for _ in range(5)]
    for candidate in several:
        policy.add(candidate)
    assert drain(policy) == several


def test_an_unstated_cost_is_guessed_from_the_size() -> None:
    assert Candidate(1000, None).cost_s == 1000 * SECONDS_PER_BYTE
    assert Candidate(1000, 0.0).cost_s == 0.0


@pytest.mark.parametrize("name", ["lru", "gdsf"])
def test_policies_against_sorting(name: str) -> None:
    rng = random.Random(7)
    policy, members = make_policy(name), []
    for _ in range(2000):
        if members and rng.random() < 0.45:
            policy.remove(members.pop(rng.randrange(len(members))))
        elif members and rng.random() < 0.2:
            victim = policy.victim()
            policy.remove(victim)
            members.remove(victim)
        else:
            members.append(Candidate(rng.randint(1, 1000), rng.random()))
            members[-1].uses = rng.randint(1, 5)
            policy.add(members[-1])
        assert set(policy.candidates()) == set(members)
    order = drain(policy)
    assert set(order) == set(members)
    if name == "lru":
        assert order == members
    else:
        assert order == sorted(members, key=lambda member: member.priority)


def test_gdsf_keeps_nothing_alive_that_is_gone() -> None:
    policy = GreedyDualSizeFrequency()
    kept = Candidate(64, 1.0)
    policy.add(kept)
    for _ in range(10_000):
        gone = Candidate(64, 1.0)
        policy.add(gone)
        policy.remove(gone)
    assert len(policy._heap) <= 66
    assert list(policy.candidates()) == [kept]


def test_gdsf_finds_an_entry_again_that_was_pinned_when_it_came_up() -> None:
    policy = GreedyDualSizeFrequency()
    low, high = Candidate(64, 1.0), Candidate(64, 2.0)
    policy.add(low)
    policy.add(high)
    policy.remove(low)
    assert policy.victim() is high
    policy.add(low)
    low.uses += 5
    policy.remove(low)
    policy.add(low)
    assert drain(policy) == [high, low]


def test_lru_keeps_nothing_alive_that_is_gone() -> None:
    policy = make_policy("lru")
    first, second = Candidate(64, None), Candidate(64, None)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    assert not hasattr(first, "before")
    assert not hasattr(first, "after")


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fifo' is not one of gdsf, lru"):
        make_policy("fifo")
