import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gda.layout.dtype_names import as_dtype, bits_of, is_storable, packed_nbytes, width_of

OF_ML_DTYPES = [name for name in dir(ml_dtypes) if re.fullmatch(r"(b?float|u?int)\d\w*", name)]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bf16", ml_dtypes.bfloat16),
        ("f32", np.float32),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("f16", np.float16),  # 16 bytes to NumPy
        # As NumPy reads them, which a command line refuses.
        ("i8", np.int64),
        ("<i2", np.int16),
        ("float", np.float64),
        ("S8", "S8"),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    ],
)
def test_names_and_types_of_dtypes(given: object, dtype: object) -> None:
    assert as_dtype(given) == np.dtype(dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nonsense", r"^dtype='nonsense' is not a dtype; a dtype is such as 'float32', np"),
        (3, r"^dtype=3 is not a dtype; a dtype is such as"),
        (np.zeros(2), r"^dtype=a ndarray is not a dtype; a dtype is such as"),
    ],
)
def test_other_values_are_no_dtype(given: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_dtype(given)


@pytest.mark.parametrize("name", [*OF_ML_DTYPES, "bool", "int8", "uint16", "float64", "complex64"])
def test_a_dtype_has_the_bits_of_its_name(name: str) -> None:
    dtype = jnp.dtype(name)
    bits = 8 if name == "bool" else int(re.findall(r"\d+", name)[0])
    assert bits_of(dtype) == bits
    assert width_of(dtype) == (bits, max(bits // 32, 1))
    assert is_storable(dtype)
    for count in range(20):
        packed = np.packbits(np.zeros(count * bits, bool))
        assert packed_nbytes(count, dtype) == packed.nbytes
        assert packed_nbytes(np.array([count]), dtype) == packed.nbytes


def test_text_has_no_bits_of_numbers() -> None:
    for dtype in ("U3", "S2", "M8[s]", "V4"):
        with pytest.raises(TypeError, match=r"a fingerprint is of numbers, not of .*; view raw"):
            width_of(np.dtype(dtype))
        assert not is_storable(np.dtype(dtype))
