"""xxh3 checksums of a file's chunks: fast enough to be computed while a chunk is in cache, on its way to disk.

Example:
    >>> digests(memoryview(b"abcdef"), 4) == (digest(memoryview(b"abcd")), digest(memoryview(b"ef")))
    True
    >>> digests(memoryview(b""), 4)
    ()
"""

from __future__ import annotations

import xxhash

from ckpt_engine.errors import ConfigError

CHUNK_BYTES = 16 * 1024 * 1024


def digest(memory: memoryview) -> str:
    """xxh3_64 of some bytes, as 16 lower-case hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(memory)


def digests(memory: memoryview, chunk_bytes: int = CHUNK_BYTES) -> tuple[str, ...]:
    """One digest for every ``chunk_bytes`` of ``memory``; the last chunk may be shorter.

    Args:
        memory: Contiguous, of any item size: chunks are counted in bytes.
        chunk_bytes: At least 1.

    Raises:
        ConfigError: ``chunk_bytes`` is not positive.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes is {chunk_bytes}: give the bytes that each checksum covers, at least 1.")
    if not memory.nbytes:  # an array without elements cannot be cast
        return ()
    data = memory.cast("B")
    return tuple(digest(data[low : low + chunk_bytes]) for low in range(0, len(data), chunk_bytes))
