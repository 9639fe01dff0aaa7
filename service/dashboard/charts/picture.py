"""PNG of a matrix: one pixel per element, blue below zero and red above."""

import struct
import zlib
from typing import Any, Final

import numpy as np

_LOW: Final = np.array([33, 102, 172], np.float64)
_ZERO: Final = np.array([247, 247, 247], np.float64)
_HIGH: Final = np.array([178, 24, 43], np.float64)
_MISSING: Final = np.array([255, 196, 0], np.uint8)


def png_of(values: np.ndarray[Any, Any]) -> bytes:
    """Encode a matrix of floats as a PNG; elements that are not finite are yellow."""
    finite = np.isfinite(values)
    drawn = np.where(finite, values, 0.0)
    most = float(np.max(np.abs(drawn), initial=0.0)) or 1.0
    share = np.clip(drawn / most, -1.0, 1.0)[..., None]
    end = np.where(share < 0, _LOW, _HIGH)
    pixels = np.round(_ZERO + (end - _ZERO) * np.abs(share)).astype(np.uint8)
    pixels[~finite] = _MISSING
    return _encoded(pixels)


def _encoded(pixels: np.ndarray[Any, Any]) -> bytes:
    height, width, _ = pixels.shape
    # Every row of a PNG begins with the number of its filter: 0, none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    # 8 bits per channel, colour type 2 (RGB), then the only compression, filter and no interlace.
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)
