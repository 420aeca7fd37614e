"""Names of full KV blocks: a hash chain over tokens and what else makes, or may see, their KV.

A block's hash covers its own tokens, the hash of the block before it and its extra keys, so equal hashes mean equal
prefixes: the KV of a token depends on every token before it. A request's namespace enters its first block that is not
public; the chain carries it to all later ones. `content_hashes` are the same chain without namespaces: what the hashes
would be if everybody shared. A request's list is kept with the request and only ever grows.
"""

from __future__ import annotations

import functools
import importlib
import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakValueDictionary

from engine.cache_identity import Adapter, CacheIdentity, ImageSpan, Namespace, extra_keys
from engine.errors import ConfigError
from engine.request import Request

ROOT_HASH = sha256(b"kvoncall/kv-block/1").digest()  # stands in for the parent of a first block; a public constant
TRUNCATED_BYTES = 2  # of SHA-256, in `unsafe_truncated`

ExtraKeys = Sequence[tuple[str, str]]


def encode_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> bytes:
    """What is hashed of a block.

    Encoding, little-endian: parent (32 bytes) | number of tokens (u32) | tokens (u32 each) | for each extra key:
    length of the tag (u32), tag (UTF-8), length of the value (u32), value (UTF-8). All parts have a fixed or a
    stated length, so two different inputs never encode alike. Raises `ValueError` on a token that does not fit.
    """
    count = struct.pack("<I", len(token_ids))
    return (parent or ROOT_HASH) + count + _encode_tokens(token_ids) + _encode_extra_keys(extra_keys)


def hash_block(parent: bytes | None, token_ids: Sequence[int], extra_keys: ExtraKeys = ()) -> bytes:
    """The 32-byte name of a full block under `sha256`, the same on every machine and in every process.

    Args: `parent`, the hash of the block before it, or `None` for a first block; `token_ids`, its tokens, each
    below 2**32; `extra_keys`, tagged pairs such as `("cache_salt", salt)`. Raises `ValueError` as `encode_block`.
    """
    return sha256(encode_block(parent, token_ids, extra_keys)).digest()


def _encode_tokens(token_ids: Sequence[int]) -> bytes:
    try:
        tokens = array("I", token_ids)
    except OverflowError as error:
        raise ValueError(f"a token id does not fit in 32 bits: {error}") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _encode_extra_keys(keys: ExtraKeys) -> bytes:
    data = b""
    for text in (text for key in keys for text in key):
        encoded = text.encode("utf-8", "surrogatepass")  # keeps the encoding one-to-one for any str
        data += struct.pack("<I", len(encoded)) + encoded
    return data


class _Digest(Protocol):
    def digest(self) -> bytes: ...


def _hash_constructor(algo: str) -> Callable[[bytes], _Digest]:
    """What hashes encoded blocks under a value of `--prefix-caching-hash-algo`.

    xxHash is not a cryptographic hash: its seed, drawn anew for every process, is all that keeps a client from
    computing collisions. Raises `ConfigError` when a package it needs is missing.
    """
    if not algo.startswith("xxhash"):
        return sha256
    return functools.partial(_package("xxhash", algo).xxh3_128, seed=secrets.randbits(64))


def _package(name: str, algo: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algo} needs the package {name}: pip install 'kvoncall[hashes]', or use sha256"
        ) from None


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Whose a block's KV truly is and what made it, whatever a fault leaves out of its hash.

    images: those that begin before the block's end, as they all had a part in its KV.
    """

    namespace: Namespace
    adapter: Adapter | None
    images: tuple[ImageSpan, ...]
    weights_version: int

    def difference(self, other: BlockIdentity) -> str | None:
        """The gravest way in which two identities differ, a kind of breach; `None` when they are equal."""
        if self == other:
            return None
        if self.namespace != other.namespace:
            return "namespace"
        if self.adapter != other.adapter:
            return "adapter"
        return "image" if self.images != other.images else "weights"


class Witness:
    """Stands for one exact prefix of one identity: equal ones have the same witness, whatever the hash says."""

    __slots__ = ("__weakref__", "identity", "parent", "tokens")

    def __init__(self, parent: Witness | None, tokens: bytes, identity: BlockIdentity) -> None:
        self.parent = parent
        self.tokens = tokens
        self.identity = identity


@dataclass(slots=True)
class BlockKeys:
    """Names of the full blocks of one request, one entry a block; `content_hashes` is `hashes` without a namespace.

    The first `num_public_blocks` carry no namespace. identities: (first block, what it and those after it have), last
    first. No block after `last_special_block` has extra keys. Witnesses are kept only if tokens are compared.
    """

    num_public_blocks: int
    last_special_block: int
    weights_version: int
    identities: Sequence[tuple[int, BlockIdentity]]
    hashes: list[bytes] = field(default_factory=list)
    content_hashes: list[bytes] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)

    def identity_of(self, index: int) -> BlockIdentity:
        """The true identity of a block."""
        for first, identity in self.identities:
            if first <= index:
                return identity
        raise IndexError(f"no block {index}")


class BlockHasher:
    """Names the blocks of requests. `fault` (`--prefix-cache-fault`) is the part of the extra keys to leave out."""

    def __init__(
        self, block_size: int, algo: str = "sha256", *, fault: str = "none", compares_tokens: bool = False
    ) -> None:
        self.block_size = block_size
        self.weights_version = 0
        self._new_hash = _hash_constructor(algo)
        self._hash_bytes = TRUNCATED_BYTES if algo == "unsafe_truncated" else None
        self._cbor = _package("cbor2", algo).dumps if algo.endswith("_cbor") else None
        self._left_out = (fault,)
        self._compares_tokens = compares_tokens
        self._is_plain = self._cbor is None and not compares_tokens
        self._count = struct.pack("<I", block_size)
        self._pack = struct.Struct(f"<{block_size + 1}I").pack  # count and tokens of one block
        self._public: list[list[int]] = []
        self._witnesses: WeakValueDictionary[tuple[Witness | None, bytes, BlockIdentity], Witness]
        self._witnesses = WeakValueDictionary()

    def set_public_prefixes(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Tokens whose blocks everybody shares; holds for requests that have no names yet."""
        self._public = [list(prefix) for prefix in prefixes]

    def keys_of(self, request: Request) -> BlockKeys:
        """The names of all full blocks of a request's tokens so far.

        Names the blocks that filled up since the last call; a block is named once in the life of a request,
        preemptions included, unless the weights change.
        """
        keys = request.block_keys
        if keys is None or keys.weights_version != self.weights_version:
            keys = request.block_keys = self._new_keys(request)
        size = self.block_size
        first, end = len(keys.hashes), len(request.all_token_ids) // size
        if first == end:
            return keys
        token_ids = request.all_token_ids[first * size : end * size]
        if first + 1 == end and first > keys.last_special_block and self._is_plain:
            self._append_plain_block(keys, token_ids)
        else:
            self._extend(keys, request.identity, token_ids, first)
        return keys

    def _append_plain_block(self, keys: BlockKeys, token_ids: list[int]) -> None:
        """`_extend` by one block without extra keys, which is what decoding does."""
        encoded = self._pack(self.block_size, *token_ids)
        num_bytes = self._hash_bytes
        namespaced = self._new_hash(keys.hashes[-1] + encoded).digest()[:num_bytes]
        if keys.content_hashes is not keys.hashes:
            keys.content_hashes.append(self._new_hash(keys.content_hashes[-1] + encoded).digest()[:num_bytes])
        keys.hashes.append(namespaced)

    def _new_keys(self, request: Request) -> BlockKeys:
        identity, size = request.identity, self.block_size
        num_public = self._num_public_blocks(request)
        identities = []
        for first in sorted({0, num_public, *(image.offset // size for image in identity.images)}, reverse=True):
            namespace = identity.namespace if first >= num_public else ()
            images = tuple(image for image in identity.images if image.offset // size <= first)
            identities.append((first, BlockIdentity(namespace, identity.adapter, images, self.weights_version)))
        last_special = max([num_public, *((image.offset + image.num_tokens) // size for image in identity.images)])
        keys = BlockKeys(num_public, last_special, self.weights_version, identities)
        if not identity.namespace:
            keys.content_hashes = keys.hashes
        return keys

    def _num_public_blocks(self, request: Request) -> int:
        """Blocks in the common start of the prompt and a public prefix; none from the first image on."""
        num_tokens = 0
        for prefix in self._public:
            end = min(len(prefix), request.num_prompt_tokens)
            if end > num_tokens:
                num_tokens = max(num_tokens, common_length(prefix, request.prompt_token_ids, end))
        for image in request.identity.images:
            num_tokens = min(num_tokens, image.offset)  # whose image it is, the placeholder tokens do not say
        return num_tokens // self.block_size

    def _extend(self, keys: BlockKeys, identity: CacheIdentity, token_ids: list[int], first: int) -> None:
        """Appends the names of the blocks with these tokens, of which the first is block `first`."""
        chain = self._canonical_chain if self._cbor is None else self._cbor_chain
        blocks: list[Any] = self._encode(token_ids) if self._cbor is None else self._split(token_ids)
        private = keys.num_public_blocks if identity.namespace else None
        extra = self._all_extra_keys(keys, identity, first, len(blocks), private)
        hashes = chain(keys.hashes, blocks, extra)
        if private is not None:
            extra = self._all_extra_keys(keys, identity, first, len(blocks), None)
            keys.content_hashes += chain(keys.content_hashes, blocks, extra)
        keys.hashes += hashes  # without a namespace it is the same list
        if self._compares_tokens:
            for index, tokens in enumerate(self._encode(token_ids), first):
                parent = keys.witnesses[-1] if keys.witnesses else None
                keys.witnesses.append(self._witness(parent, tokens, keys.identity_of(index)))

    def _split(self, token_ids: list[int]) -> list[list[int]]:
        size = self.block_size
        return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]

    def _encode(self, token_ids: list[int]) -> list[bytes]:
        """Number of tokens and tokens of each block, as in `encode_block`."""
        count, width = self._count, 4 * self.block_size
        data = _encode_tokens(token_ids)
        return [count + data[start : start + width] for start in range(0, len(data), width)]

    def _canonical_chain(
        self, chain: Sequence[bytes], blocks: Sequence[bytes], extra: Mapping[int, ExtraKeys]
    ) -> list[bytes]:
        """What `chain` goes on with. blocks: see `_encode`; extra: extra keys by place in `blocks`, most have none."""
        if extra:
            blocks = list(blocks)
            for place, keys in extra.items():
                blocks[place] += _encode_extra_keys(keys)
        new_hash, num_bytes = self._new_hash, self._hash_bytes
        parent = chain[-1] if chain else ROOT_HASH
        hashes = []
        for block in blocks:
            parent = new_hash(parent + block).digest()[:num_bytes]
            hashes.append(parent)
        return hashes

    def _cbor_chain(
        self, chain: Sequence[bytes], blocks: Sequence[list[int]], extra: Mapping[int, ExtraKeys]
    ) -> list[bytes]:
        """The same as vLLM encodes it: CBOR of parent, tokens and extra keys, if any. blocks: their tokens."""
        assert self._cbor is not None
        parent = chain[-1] if chain else ROOT_HASH
        hashes = []
        for place, block in enumerate(blocks):
            encoded = self._cbor((parent, tuple(block), extra.get(place) or None), canonical=True)
            parent = self._new_hash(encoded).digest()
            hashes.append(parent)
        return hashes

    def _all_extra_keys(
        self, keys: BlockKeys, identity: CacheIdentity, first: int, count: int, private: int | None
    ) -> dict[int, ExtraKeys]:
        """Extra keys of those of `count` blocks, by place from `first` on, that may have some.

        private: the block the namespace enters, `None` for the chain without it.
        """
        last = min(keys.last_special_block + 1, first + count)
        special = range(first, last) if identity.images else {0, private or 0}
        return {i - first: self._extra_keys(identity, i, private) for i in special if first <= i < last}

    def _extra_keys(self, identity: CacheIdentity, index: int, private: int | None) -> tuple[tuple[str, str], ...]:
        return extra_keys(
            identity,
            index * self.block_size,
            self.block_size,
            root=index == 0,
            private=index == private,
            weights_version=self.weights_version,
            left_out=self._left_out,
        )

    def _witness(self, parent: Witness | None, tokens: bytes, identity: BlockIdentity) -> Witness:
        witness = self._witnesses.get((parent, tokens, identity))
        if witness is None:
            witness = self._witnesses[parent, tokens, identity] = Witness(parent, tokens, identity)
        return witness


def common_length(left: Sequence[int], right: Sequence[int], limit: int) -> int:
    """How many tokens, up to `limit`, two sequences have in common at their start."""
    if left[:limit] == right[:limit]:
        return limit
    return next(index for index in range(limit) if left[index] != right[index])
