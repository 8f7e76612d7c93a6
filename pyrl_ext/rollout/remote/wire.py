"""Frames in which named tensors cross a network from the trainer to its engines.

An engine connects to each of the trainer's ranks that send, and both prove that they know a secret,
without sending it. Then frames come: the way of the bytes, buckets of tensors, and an end. A frame
is a head of fixed size, a description in JSON, and the bytes of its tensors, which come over the
same connection or, as the way says, from the engine before (`relay`). Nothing is pickled. What a
description says is compared with the tensors that the engine holds before memory is allocated, so
nobody makes it allocate more than those have in float32. Bytes are neither encrypted nor signed:
digests, one of
each bucket and its description, find faults, not forgery, so the network has to be a private one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrl_ext.ops.digest import digest
from pyrl_ext.parallel.buckets import Bucket

MAGIC = b"pyrl weights 3\r\n"
PROOF = 32  # of a nonce, and of a proof [bytes]
HEAD = struct.Struct("<cxxxIQ")  # kind, size of the description, size of the tensors [bytes]
WAY = b"W"
BUCKET = b"B"
END = b"E"
CHUNK = 4 << 20  # bytes after which the place in a bucket is noted
MAX_DESCRIPTION = 1 << 24  # [bytes]
MAX_NAME = 512  # of a tensor [characters]
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}

Size = Sequence[int]
# Fills the memory with the bytes that come next; raises WireError if they do not come.
Read = Callable[[memoryview], None]


class WireError(RuntimeError):
    """The other end sent something wrong; nothing of it is used."""


def need(ok: bool, found: str, rule: str) -> None:
    """Raises WireError unless ``ok``."""
    if not ok:
        raise WireError(f"weights: {found}, expected {rule}; what came of them is dropped")


def need_kinds(fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raises WireError unless there are exactly these fields, each of its kind."""
    need(fields.keys() == kinds.keys(), f"fields {sorted(fields)}", f"{sorted(kinds)}")
    for name, kind in kinds.items():
        good = isinstance(fields[name], kind) and not isinstance(fields[name], bool)
        need(good, f"{name} is a {type(fields[name]).__name__}", f"{kind}")


# proofs of the secret ----------------------------------------------------------------------------


def prove(secret: str, role: bytes, theirs: bytes, ours: bytes) -> bytes:
    """That ``role`` knows the secret: HMAC-SHA256 of both nonces."""
    return hmac.digest(secret.encode(), role + theirs + ours, "sha256")


def same(proof: bytes, expected: bytes) -> bool:
    """True if a proof is right, in a time that does not depend on how far it is."""
    return hmac.compare_digest(proof, expected)


# sending -----------------------------------------------------------------------------------------


def way_frame(way: Mapping[str, Any]) -> bytes:
    """The frame before a sender's first bucket: the fields of `relay.Way`."""
    return _frame(WAY, way, 0)


def bucket_frame(number: int, bucket: Bucket, buffer: Tensor) -> bytes:
    """The head and the description of a bucket, which its ``bucket.bytes`` bytes follow.

    Syncs: once, for the digest.
    """
    tensors = [[slot.name, str(slot.dtype)[6:], list(slot.shape)] for slot in bucket.slots]
    known = {"tensors": tensors, "digest": _digest(tensors, buffer[: bucket.bytes])}
    return _frame(BUCKET, {"number": number} | known, bucket.bytes)


def _digest(tensors: Sequence[Any], buffer: Tensor) -> str:
    """The digest of a bucket's bytes and of what its description says of them. One for each tensor
    took most of a publish of small ones. Syncs: once."""
    return hashlib.sha256(json.dumps([tensors, digest(buffer)]).encode()).hexdigest()


def end_frame(number: int, version: int, tensors: Mapping[str, Size]) -> bytes:
    """The frame after a sender's last bucket: how many tensors it sent, and which."""
    known = {"number": number, "version": version, "count": len(tensors)}
    return _frame(END, known | {"names": names_digest(tensors)}, 0)


def names_digest(tensors: Mapping[str, Size]) -> str:
    """SHA-256 of names and shapes, whatever their order."""
    lines = sorted(f"{name} {list(shape)}" for name, shape in tensors.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _frame(kind: bytes, description: Mapping[str, Any], payload: int) -> bytes:
    text = json.dumps(description, separators=(",", ":")).encode()
    assert len(text) <= MAX_DESCRIPTION, f"a bucket whose names take {len(text)} bytes"
    return HEAD.pack(kind, len(text), payload) + text


# receiving ---------------------------------------------------------------------------------------


def frame(read: Read, *kinds: bytes) -> tuple[bytes, dict[str, Any], int]:
    """The kind and the description of the next frame, and the bytes of its tensors."""
    kind, size, payload = HEAD.unpack(_bytes(read, HEAD.size))
    need(kind in kinds, f"a frame of kind {kind!r}", f"one of {[*kinds]}")
    rule = f"at most {MAX_DESCRIPTION}"
    need(size <= MAX_DESCRIPTION, f"a description of {size} bytes", rule)
    return kind, _description(_bytes(read, size)), payload


class Incoming:
    """The tensors of one transfer, from any number of senders at once, each verified.

    Args:
        wanted: name -> shape of the tensors that have to come, each exactly once
        version: of them
    """

    def __init__(self, wanted: Mapping[str, Size], version: int):
        self.wanted = wanted
        self.version = version
        self._claimed = dict[str, object]()
        self._came = dict[str, Tensor]()

    def take(self, read: Read, payload: Read, note: Callable[[str], object]) -> None:
        """All frames of one sender behind the first; each sender's in a thread.

        Args:
            read: gives the bytes of the frames
            payload: gives the bytes of their tensors
            note: called with the name of each tensor before its bytes are read

        Raises: WireError naming what is wrong; what ``read`` does.
        """
        found = dict[str, Tensor]()
        number = 0
        while True:
            kind, fields, size = frame(read, BUCKET, END)
            need(fields.get("number") == number, f"frame {fields.get('number')!r}", f"{number}")
            if kind == END:
                need(size == 0, f"{size} bytes after the end", "none")
                self._check_end(fields, found)
                self._came |= found
                return
            found |= self._bucket(payload, note, fields, size)
            number += 1

    def complete(self) -> dict[str, Tensor]:
        """All tensors, in the order of ``wanted``. Raises: WireError unless it is all of that."""
        missing = [name for name in self.wanted if name not in self._came]
        need(not missing, f"{len(missing)} tensors missing, {missing[:4]}", "all that it holds")
        return {name: self._came[name] for name in self.wanted}

    def _bucket(
        self,
        read: Read,
        note: Callable[[str], object],
        fields: Mapping[str, Any],
        size: int,
    ) -> dict[str, Tensor]:
        tensors = fields.get("tensors")
        wanted = self.wanted
        need(isinstance(tensors, list) and bool(tensors), "a bucket without tensors", "some")
        layout = list[tuple[str, torch.dtype, Size]]()
        for name, dtype, shape in map(_tensor, tensors or ()):
            need(name in wanted, f"{name[:MAX_NAME]!r}", "a tensor that the engine holds")
            # one step, also with other senders: the first one has the name
            claim = object()
            need(
                self._claimed.setdefault(name, claim) is claim, f"{name} twice", "each tensor once"
            )
            rule = f"{list(wanted[name])}"
            need(shape == list(wanted[name]), f"{name} of shape {str(shape)[:200]}", rule)
            layout.append((name, dtype, shape))
        bucket = Bucket.of(layout)
        need(size == bucket.bytes, f"{size} bytes of tensors", f"{bucket.bytes}")
        buffer = torch.empty(bucket.bytes, dtype=torch.uint8)
        for start in range(0, bucket.bytes, CHUNK):
            note(bucket.name_at(start))
            read(memoryview(buffer[start : start + CHUNK].numpy()))
        which = f"the {len(layout)} tensors from {layout[0][0]} to {layout[-1][0]}"
        good = fields.get("digest") == _digest(tensors or (), buffer)
        need(good, f"{which} with another digest", "the one with which they left the trainer")
        return {slot.name: slot.view(buffer) for slot in bucket.slots}

    def _check_end(self, fields: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
        version = fields.get("version")
        names = {name: self.wanted[name] for name in found}
        need(version == self.version, f"version {version!r}", f"{self.version}")
        need(fields.get("count") == len(found), "another count of tensors", f"{len(found)}")
        need(fields.get("names") == names_digest(names), "names of other tensors", "the same")


def _bytes(read: Read, size: int) -> bytes:
    data = bytearray(size)
    read(memoryview(data))
    return bytes(data)


def _description(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"weights: a description that is no JSON ({error})") from None
    need(isinstance(fields, dict), "a description of another kind", "an object")
    return fields


def _tensor(each: object) -> tuple[str, torch.dtype, list[int]]:
    need(isinstance(each, list) and len(each) == 3, "a tensor of other fields", "three")
    assert isinstance(each, list)
    name, dtype, shape = each
    need(isinstance(name, str) and len(name) <= MAX_NAME, "a name", f"{MAX_NAME} characters")
    need(isinstance(dtype, str) and dtype in DTYPES, f"dtype {str(dtype)[:40]}", f"{[*DTYPES]}")
    good = isinstance(shape, list) and all(type(size) is int for size in shape)
    need(good, f"{name}: shape {str(shape)[:80]}", "integers")
    return name, DTYPES[dtype], shape
