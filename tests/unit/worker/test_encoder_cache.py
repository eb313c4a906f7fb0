import pytest
import torch

from ecotone.protocol.connector import EncoderSpec
from ecotone.worker.encoder_cache import RankEncoderCache


@pytest.fixture
def cache():
    return RankEncoderCache(EncoderSpec(4, 1, "bfloat16"), torch.device("cpu"))


def rows(num_rows=3, width=8, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(num_rows, width, dtype=dtype, device=device)


def test_what_fits_is_handed_out(cache):
    cache["k"] = value = rows()
    assert cache.rows("k", 3) is value
    assert cache.rows("other", 3) is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (rows(2), r"shape [2, 8] instead of [3, 8]"),
        (rows(width=4), r"shape [3, 4] instead of [3, 8]"),
        (rows().flatten(), r"shape [24] instead of [3, 8]"),
        (rows(dtype=torch.float16), "dtype float16 instead of bfloat16"),
        (rows(device="meta"), "device meta instead of cpu"),
    ],
)
def test_what_does_not_fit_is_not(cache, value, says):
    cache["k"] = value
    assert cache.rows("k", 3) is None
    assert cache.mismatch(value, 3) == says


def test_dropping_what_is_not_there_changes_nothing(cache):
    cache.update(a=rows(), b=rows(2))
    assert cache.statistics() == {
        "encoder_cache_entries": 2,
        "encoder_cache_rows": 5,
        "encoder_cache_bytes": 5 * 8 * 2,
    }
    cache.drop(["b", "b", "c"])
    assert set(cache) == {"a"}
