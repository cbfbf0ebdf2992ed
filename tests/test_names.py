"""The names of ``gda/__init__.py``."""

import pytest

import gda


@pytest.mark.parametrize(
    ("name", "successor"), [("GlobalDeviceArray", "GlobalArray"), ("pjit", "jit")]
)
def test_names_of_2022_lead_to_their_successors(name: str, successor: str) -> None:
    message = f"module 'gda' has no attribute '{name}'; its successor is gda.{successor}$"
    with pytest.raises(AttributeError, match=message):
        getattr(gda, name)
    assert not hasattr(gda, name)


def test_the_module_of_pictures_says_what_to_call() -> None:
    message = r"gda\.show is a module; gda\.visualize_sharding\(x\) shows the picture"
    with pytest.raises(TypeError, match=message):
        gda.show((8,), {"x": 2}, ("x",))  # pyright: ignore[reportCallIssue]
