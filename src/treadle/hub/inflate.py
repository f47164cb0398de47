"""Request bodies as they were before gzip, never larger than allowed, whatever they claim to be."""

from __future__ import annotations

import zlib

from treadle.hub.refusals import Refused

FEED_BYTES = 2**16
STEP_BYTES = 2**20
MAX_MEMBERS = 4096  # parallel compressors write one for each 64 KiB or more


def inflate(packed: bytes | bytearray, limit: int) -> bytearray:
    """Step by step, so that a small body that would become gigabytes costs no more than the limit.

    It is fed in small pieces: zlib copies what it leaves over, and millions of empty members would each copy it all.
    """
    body = bytearray()
    view = memoryview(packed)
    inflater = _gzip_inflater()
    at, num_members = 0, 1
    while at < len(packed):
        if inflater.eof:  # a gzip file may have several members, one after the other
            inflater, num_members = _gzip_inflater(), num_members + 1
        if num_members > MAX_MEMBERS:
            raise bad_gzip()
        fed: bytes | memoryview = view[at : at + FEED_BYTES]
        at += len(fed)
        while fed:
            try:
                body += inflater.decompress(fed, STEP_BYTES)
            except zlib.error:
                raise bad_gzip() from None
            if len(body) > limit:
                raise too_large(limit)
            fed = inflater.unconsumed_tail
        at -= len(inflater.unused_data)
    if packed and not inflater.eof:
        raise bad_gzip()
    return body


def bad_gzip() -> Refused:
    return Refused(400, "Invalid gzip payload", reason="bad_gzip")


def too_large(limit: int) -> Refused:
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return Refused(413, f"the body is larger than {size}", reason="too_large")


def _gzip_inflater() -> zlib._Decompress:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
