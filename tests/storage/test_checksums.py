"""CRC-32C of memory; the oracle is the table of the polynomial, byte by byte."""

import ml_dtypes
import numpy as np
import pytest

from gda.storage.stores.checksums import crc32c

DATA = np.random.default_rng(0).integers(0, 256, 2**20 + 3, np.uint8)


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


TABLE = [_entry(byte) for byte in range(256)]


def expected_crc(data: bytes, before: int = 0) -> int:
    crc = before ^ 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def test_crc_of_the_check_value_of_the_standard() -> None:
    assert crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


def test_crc_of_two_parts_of_every_size_at_every_alignment() -> None:
    for start in range(64):
        crc = 0
        for size in range(300):
            half = start + size // 2
            before = crc32c(DATA[start:half])
            assert crc32c(DATA[half : start + size], before) == crc, (start, size)
            crc = expected_crc(DATA[start + size : start + size + 1].tobytes(), crc)


@pytest.mark.parametrize("start", [0, 1, 13])
def test_crc_of_every_size_up_to_that_of_long_loops(start: int) -> None:
    crc = 0
    for size in range(5000):
        assert crc32c(DATA[start : start + size]) == crc, size
        crc = expected_crc(DATA[start + size : start + size + 1].tobytes(), crc)


def test_crc_of_a_chunk() -> None:
    assert crc32c(DATA) == expected_crc(DATA.tobytes())


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, ml_dtypes.bfloat16, np.bool_])
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 4)])
def test_crc_of_arrays_of_any_dtype_and_shape(dtype: type, shape: tuple[int, ...]) -> None:
    data = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    data.flags.writeable = False
    assert crc32c(data) == expected_crc(data.tobytes())
