"""The contrast of colours, by the formula of WCAG 2."""

import numpy as np


def linear(color: str) -> np.ndarray:
    """Return the light of the three channels of a colour such as ``#77aadd``, from 0 to 1."""
    channels = np.array([*bytes.fromhex(color[1:])]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Return the ratio of the light of two colours, from 1 to 21."""
    low, high = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)
