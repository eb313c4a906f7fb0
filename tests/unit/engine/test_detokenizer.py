"""Text grows by whole characters, adds up to what decoding everything gives, and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ecotone.engine.detokenizer import REPLACEMENT, IncrementalDetokenizer


class ByteLevel:
    """One token per byte, as the byte-level BPE tokenizers have at the bottom; and one special token."""

    EOS = 256

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(["</s>"])

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


class Words(ByteLevel):
    """Words with a mark for the space before them; decoding drops the first word's space."""

    def __init__(self) -> None:
        vocab = {"▁one": 0, "▁two": 1, "▁three": 2, "teen": 3, "<unk>": 4}
        self._tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        self._tokenizer.decoder = decoders.Metaspace()


BYTES = ByteLevel()


def run(
    ids: Sequence[int], stop: Sequence[str] = (), tokenizer: ByteLevel = BYTES
) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(detokenizer.append(token_id))
        if detokenizer.stopped_by is not None:
            break
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text
    return pieces, detokenizer.stopped_by


@given(st.text(max_size=30))
def test_pieces_of_any_text_add_up_and_are_whole(text: str) -> None:
    pieces, _ = run(BYTES.encode(text))
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_tokens_add_up_to_decoding_them_all(ids: list[int]) -> None:
    pieces, _ = run(ids)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_tokens_text_depends_on_the_one_before(ids: list[int]) -> None:
    words = Words()
    pieces, _ = run(ids, tokenizer=words)
    assert "".join(pieces) == words.decode(ids, skip_special_tokens=True)


def test_a_character_appears_when_it_is_whole() -> None:
    pieces, _ = run(BYTES.encode("a€b"))
    assert pieces == ["a", "", "", "€", "b", ""]


def test_a_character_that_stays_incomplete_comes_at_the_end() -> None:
    pieces, _ = run(BYTES.encode("a€")[:-1])
    assert pieces == ["a", "", "", REPLACEMENT]


def test_special_tokens_have_no_text() -> None:
    pieces, stopped = run([*BYTES.encode("ab"), ByteLevel.EOS], stop=["</s>"])
    assert pieces == ["a", "b", "", ""]
    assert stopped is None


def test_a_stop_string_over_several_tokens_is_cut_off() -> None:
    pieces, stopped = run(BYTES.encode("one. STOP two"), stop=["STOP"])
    assert "".join(pieces) == "one. "
    assert stopped == "STOP"


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    pieces, stopped = run(BYTES.encode("a<e<en>b"), stop=["<end>"])
    assert pieces == ["a", "", "", "<e", "", "", "<en>", "b", ""]
    assert stopped is None


def test_held_back_text_comes_out_at_the_end() -> None:
    pieces, stopped = run(BYTES.encode("a<en"), stop=["<end>"])
    assert pieces == ["a", "", "", "", "<en"]
    assert stopped is None


def test_nothing_comes_after_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, ["b"])
    assert [detokenizer.append(i) for i in BYTES.encode("abcd")] == ["a", "", "", ""]
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a"


@given(
    text=st.text("ab<€", max_size=16),
    stop=st.lists(st.text("ab<€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_against_a_plain_search(text: str, stop: list[str]) -> None:
    expected, found = text, False
    for end in range(len(text) + 1):
        starts = [text[:end].find(s) for s in stop if s in text[:end]]
        if starts:
            expected, found = text[: min(starts)], True
            break
    detokenizer = IncrementalDetokenizer(BYTES, stop)
    for token_id in BYTES.encode(text):
        detokenizer.append(token_id)
        assert expected.startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == expected
    assert (detokenizer.stopped_by is not None) == found


@pytest.mark.parametrize("stop", [["zz"], ["zz", "yyyyy"]])
def test_text_without_a_stop_string_is_untouched(stop: list[str]) -> None:
    pieces, stopped = run(BYTES.encode("zyzyyzy"), stop=stop)
    assert "".join(pieces) == "zyzyyzy"
    assert stopped is None
