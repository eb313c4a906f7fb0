"""Keys: everything that changes an encoding changes the key, and nothing else does."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecotone.errors import ConfigError, DecodeError
from ecotone.node import Namespace, namespace_of, options_digest
from ecotone.node.keys import check_key, check_namespace

BASE = Namespace(model="m", revision="r", dtype="bfloat16", width=64, processor="p", adapter="a", tenant="t")

CHANGES: dict[str, object] = {
    "model": "m2",
    "revision": "r2",
    "epoch": 1,
    "life": "l2",
    "dtype": "float16",
    "width": 128,
    "processor": "p2",
    "adapter": "a2",
    "tenant": "t2",
}


def test_every_field_has_a_change_below() -> None:
    assert set(CHANGES) == {field.name for field in msgspec.structs.fields(Namespace)}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_digest_and_key(field: str) -> None:
    other = msgspec.structs.replace(BASE, **{field: CHANGES[field]})
    assert other.digest != BASE.digest
    assert other.key("x").split(":")[1] != BASE.key("x").split(":")[1]


def test_the_identity_is_a_full_sha256_of_namespace_and_item() -> None:
    key = BASE.key("x")
    group, identity = key.split(":")
    assert group == BASE.digest == namespace_of(key)
    assert (len(group), len(identity)) == (32, 64)
    assert identity != BASE.key("y").split(":")[1]


def test_keys_are_the_same_in_another_process() -> None:
    program = f"from ecotone.node import Namespace as N; print(N(**{msgspec.structs.asdict(BASE)!r}).key('x'))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == BASE.key("x")


def test_next_epoch_shares_no_key_with_an_earlier_one() -> None:
    epochs = [BASE, BASE.next_epoch("a"), BASE.next_epoch("a").next_epoch("a")]
    assert len({n.digest for n in epochs}) == len({n.key("x") for n in epochs}) == 3


def test_updates_of_two_processes_share_no_key() -> None:
    # Each of them counts from its own start, and what the weights became is known to nobody else.
    one, other = BASE.next_epoch("a"), BASE.next_epoch("b")
    assert one.epoch == other.epoch
    assert one.key("x") != other.key("x")


texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["../x", "a\0b", "", ":", "\ud800"])


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_fields_cannot_flow_into_each_other(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    def key(parts: tuple[str, str, str]) -> str:
        model, tenant, item = parts
        return msgspec.structs.replace(BASE, model=model, tenant=tenant).key(item)

    assert (key(one) == key(two)) == (one == two)
    assert check_key(key(one)) == key(one)


def test_moving_a_character_over_a_border_changes_the_key() -> None:
    one = msgspec.structs.replace(BASE, adapter="ab", tenant="c")
    two = msgspec.structs.replace(BASE, adapter="a", tenant="bc")
    assert one.key("x") != two.key("x")


@pytest.mark.parametrize(
    "key", ["", "x", "../../etc/passwd", BASE.key("x") + "\n", BASE.key("x").upper(), BASE.digest]
)
def test_what_is_not_a_key_is_refused(key: str) -> None:
    with pytest.raises(DecodeError, match="is not a cache key"):
        namespace_of(key)


@pytest.mark.parametrize("digest", ["", "a" * 31, "g" * 32, BASE.key("x")])
def test_what_is_not_a_namespace_is_refused(digest: str) -> None:
    with pytest.raises(DecodeError, match="is not a namespace digest"):
        check_namespace(digest)


def test_an_impossible_namespace_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match="float17"):
        msgspec.structs.replace(BASE, dtype="float17")
    with pytest.raises(ConfigError, match="width=0"):
        msgspec.structs.replace(BASE, width=0)
    with pytest.raises(ConfigError, match="epoch=-1"):
        msgspec.structs.replace(BASE, epoch=-1)


def test_options_digest_depends_on_values_not_on_order() -> None:
    assert options_digest({"a": 1, "b": {"c": 2, "d": 3}}) == options_digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert options_digest({"fps": 1}) != options_digest({"fps": 2})
    assert len(options_digest({})) == 64
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        options_digest({"a": object()})
