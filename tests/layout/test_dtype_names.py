import ml_dtypes
import numpy as np
import pytest

from gda.layout.dtype_names import as_dtype


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
