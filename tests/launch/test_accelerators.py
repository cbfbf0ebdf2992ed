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
        (None, {"libtpu", "jax_plugins"}, (), False),
        (None, {"libtpu"}, ("a plugin",), False),
    ],
)
def test_only_libtpu_where_nothing_else_is(
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
    monkeypatch.setattr(accelerators, "entry_points", lambda group: plugins)
    assert accelerators.has_only_libtpu() is expected
