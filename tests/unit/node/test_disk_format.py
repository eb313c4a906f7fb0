"""The file of an entry: any safetensors reader understands it, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecotone.errors import DecodeError
from ecotone.node import Layout, Namespace
from ecotone.node.disk.files import read_header
from ecotone.node.disk.format import (
    MAX_HEADER_BYTES,
    MIN_FILE_BYTES,
    charged,
    encode_header,
    file_bytes,
    header_length,
    key_of,
    parse_header,
    relative_path,
)
from ecotone.protocol.arrays import ITEM_SIZES

NS = Namespace(model="m", revision="r", dtype="bfloat16", width=64, processor="p")
KEY = NS.key("cat")
DIGEST = "5" * 64

layouts = st.builds(
    Layout, st.sampled_from(sorted(ITEM_SIZES)), st.lists(st.integers(1, 9), max_size=5).map(tuple)
)


@given(layouts, st.text("0123456789abcdef", min_size=64, max_size=64))
def test_a_header_says_what_was_written(layout: Layout, digest: str) -> None:
    data = encode_header(KEY, layout, digest)
    assert len(data) == 8 + header_length(data[:8]) == len(encode_header(KEY, layout))
    assert len(data) % 8 == 0
    assert len(data) + layout.nbytes == file_bytes(KEY, layout) > MIN_FILE_BYTES
    parsed = parse_header(data[8:])
    assert (parsed.key, parsed.layout, parsed.digest) == (KEY, layout, digest)
    assert (parsed.payload_offset, parsed.file_bytes) == (len(data), file_bytes(KEY, layout))


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
def test_the_safetensors_library_reads_it(dtype: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    layout = Layout(dtype, (3, 4))
    data = bytes(i % 2 for i in range(layout.nbytes))
    path = tmp_path / "entry.safetensors"
    path.write_bytes(encode_header(KEY, layout, DIGEST) + data)
    with safetensors.safe_open(path, "pt") as file:
        rows, metadata = file.get_tensor("rows"), file.metadata()
    assert rows.shape == (3, 4)
    assert rows.dtype == getattr(torch, dtype)
    assert rows.view(torch.uint8).numpy().tobytes() == data
    assert metadata == {
        "format": "ecotone-entry-1",
        "namespace": NS.digest,
        "key": KEY,
        "dtype": dtype,
        "shape": "[3,4]",
        "digest": DIGEST,
    }


def _changed(*path: str, to: object) -> bytes:
    header = json.loads(encode_header(KEY, Layout("bfloat16", (2, 3)), DIGEST)[8:])
    *folders, name = path
    inner = header
    for folder in folders:
        inner = inner[folder]
    inner[name] = to
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not the header"),
        (b"\xff\xfe", "not the header"),
        (b"[1]", "not the header"),
        (b"[" * 10_000, "not the header"),
        (b'{"__metadata__": {"format": "pt"}, "w": {"dtype": "F32"}}', "format 'pt'"),
        (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "not the header"),
        (_changed("__metadata__", "format", to="ecotone-entry-0"), "ecotone-entry-0"),
        (_changed("__metadata__", "extra", to="x"), "unknown field"),
        (_changed("__metadata__", "key", to="../" * 20), "not a cache key"),
        (_changed("__metadata__", "namespace", to="0" * 32), "namespace"),
        (_changed("__metadata__", "digest", to="5" * 63), "digest"),
        (_changed("__metadata__", "shape", to="[3,2]"), "another tensor"),
        (_changed("__metadata__", "dtype", to="float16"), "another tensor"),
        (_changed("rows", "shape", to=[-1, -3]), "length below 1"),
        (_changed("rows", "shape", to=[2, 3.5]), "not the header"),
        (_changed("rows", "dtype", to="F4"), "dtype"),
        (_changed("rows", "data_offsets", to=[0, 2**70]), "data_offsets"),
        (_changed("rows", "data_offsets", to=[4, 16]), "data_offsets"),
        (_changed("rows", "data_offsets", to=[0, 13]), "data_offsets"),
    ],
)
def test_what_is_no_header_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        parse_header(data)


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse_header(data)


@pytest.mark.parametrize("prefix", [b"", b"1234567", (MAX_HEADER_BYTES + 1).to_bytes(8, "little"), b"\xff" * 8])
def test_a_length_is_believed_within_bounds_only(prefix: bytes) -> None:
    with pytest.raises(DecodeError, match="no header"):
        header_length(prefix)


def test_places_are_made_of_digests_only() -> None:
    place = relative_path(KEY)
    namespace, fan, name = place.split("/")
    assert key_of(namespace, fan, name) == KEY
    for bad in ("../x", "", KEY.upper(), KEY + "0", KEY[:-1] + "/", "a" * 97):
        with pytest.raises(DecodeError):
            relative_path(bad)
    for bad in ("x", name.upper(), name[:-1], name + "~", name.replace(".", "_")):
        assert key_of(namespace, fan, bad) is None
    assert key_of(namespace, "zz", name) is None


def test_whole_blocks_are_charged() -> None:
    assert [charged(n) for n in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(DecodeError, match="not a file"):
            read_header(fd)
    finally:
        os.close(fd)
