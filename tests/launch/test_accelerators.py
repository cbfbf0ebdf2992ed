"""The accelerators that a machine has, by pretended devices and packages."""

from pathlib import Path

import pytest

from gda.launch import accelerators


@pytest.mark.parametrize(
    ("device", "packages", "plugins", "expected"),
    [
        (None, {"libtpu"}, (), True),
        (None, (), (), False),
        ("accel0", {"libtpu"}, (), False),
        ("vfio/0", {"libtpu"}, (), False),
        ("vfio/vfio", {"libtpu"}, (), True),
        (None, {"libtpu"}, ("xla_cuda13",), True),
        (None, (), ("xla_cuda13",), True),
        ("nvidia0", {"libtpu"}, ("xla_cuda13",), False),
        ("dxg", (), ("xla_cuda13",), False),
        (None, {"libtpu"}, ("xla_cuda13", "another"), False),
    ],
)
def test_only_compilers_are_here(
    device: str | None,
    packages: set[str],
    plugins: tuple[str, ...],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device is not None:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    monkeypatch.setattr(accelerators, "_DEVICES", tmp_path)
    monkeypatch.setattr(accelerators, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(accelerators, "_plugins", lambda: plugins)
    assert accelerators.has_only_compilers() is expected
