"""Which hash stands for which rows: a binary Merkle radix tree over SHA-256 of the keys, whose values never change.

It is the tree of Diem's state (Gao, Hu, Wu, "Jellyfish Merkle Tree", 2021, section 3), two ways at a branch. No rows have the
hash `EMPTY`. One row alone has its own hash, at whatever depth it is alone. More rows have the hash of their two halves. So the
root depends on the rows alone.

Buckets have no part in the root. A bucket is a highest subtree of at most `BUCKET_ROWS_MAX` rows: it is read and written at once,
and only what lies above the buckets is held in memory.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from protocol import codec
from protocol.errors import StorageError
from protocol.limits import ROW_BYTES_MAX, ROW_KEY_BYTES_MAX

EMPTY: Final = bytes(32)  # nobody knows anything with this hash
DEPTH_MAX: Final = 256  # bits of a path
# With half as many, branches take twice the memory; with twice as many, a block hashes twice the rows that it does not change.
BUCKET_ROWS_MAX: Final = 16
ROW_HEADS_BYTES: Final = 6  # what the encoding of a pair adds to key and value, at most

assert ROW_KEY_BYTES_MAX < 1 << 8 and ROW_BYTES_MAX < 1 << 16  # heads of one, two and three bytes

# Nodes are plain tuples: Python's cycle collector does not look at tuples of what cannot be part of a cycle. If they were objects
# of a class, a table of a million rows would stop the process for a fifth of a second every now and then.
Bucket: TypeAlias = tuple[bytes, int, int, "int | bytes"]  # hash, rows, size; the slot of a store where its data are, or its data
Branch: TypeAlias = tuple[bytes, int, int, "Node", "Node"]  # hash, rows, size, left, right
Node: TypeAlias = "Branch | Bucket | None"  # None: no rows

Row: TypeAlias = tuple[bytes, bytes, bytes]  # path, key, encoded value
RowChange: TypeAlias = tuple[bytes, bytes, "bytes | None"]  # the same; None: the row goes
BucketReader: TypeAlias = Callable[[int, bytes], bytes]  # the data of the bucket in this slot, which has this hash

BucketHashes: TypeAlias = tuple[Sequence[bytes], Sequence[bytes]]  # of a bucket's rows: their paths, and the hashes of the rows

# A row that has changed soon changes again: a task is begun, answered and settled. Of so many buckets, about 8 MB, we keep what
# need not be hashed then, by the bucket's hash, which says all of it.
HASHED_MAX: Final = 4_096
_recent: OrderedDict[bytes, BucketHashes] = OrderedDict()

_sha256 = hashlib.sha256
_ROW, _BRANCH = b"folkmoot/row\x00", b"folkmoot/branch\x00"
_BRANCH_EMPTY = _BRANCH + EMPTY


def path_of(key: bytes) -> bytes:
    """Where a key lies: from the highest bit of the first byte on, 0 goes left and 1 goes right."""
    return _sha256(key).digest()


def leaf_hash(path: bytes, value_digest: bytes) -> bytes:
    return _sha256(_ROW + path + value_digest).digest()


def row_hash(path: bytes, value: bytes) -> bytes:
    return _sha256(_ROW + path + _sha256(value).digest()).digest()


def branch_hash(left: bytes, right: bytes) -> bytes:
    return _sha256(_BRANCH + left + right).digest()


def goes_right(path: bytes, depth: int) -> int:
    return path[depth >> 3] >> (7 - (depth & 7)) & 1


def hash_of(node: Node) -> bytes:
    return EMPTY if node is None else node[0]


def rows_in(node: Node) -> int:
    return 0 if node is None else node[1]


def size_of(node: Node) -> int:
    return 0 if node is None else node[2]


def make_branch(left: Node, right: Node) -> Branch:
    hash, rows = branch_hash(hash_of(left), hash_of(right)), rows_in(left) + rows_in(right)
    assert rows > BUCKET_ROWS_MAX
    return hash, rows, size_of(left) + size_of(right), left, right


def read_no_bucket(slot: int, hash: bytes) -> bytes:
    """Reads a tree whose buckets are all in memory."""
    raise StorageError("the rows of this table are not here")


# Reading -----------------------------------------------------------------------------------------------------------------


def bucket_data(bucket: Bucket, read: BucketReader) -> bytes:
    place = bucket[3]
    return place if isinstance(place, bytes) else read(place, bucket[0])


def bucket_items(bucket: Bucket, read: BucketReader) -> list[bytes]:
    """Key, value, key, value …, by path."""
    found: list[bytes] = codec.unpack(data := bucket_data(bucket, read), len(data))
    return found


def find_row(node: Node, read: BucketReader, key: bytes) -> bytes | None:
    """The encoded value of a key."""
    path, depth = path_of(key), 0
    while node is not None and len(node) == 5:
        node = node[4] if goes_right(path, depth) else node[3]
        depth += 1
    if node is None:
        return None
    rows = bucket_items(node, read)
    try:
        return rows[2 * rows[::2].index(key) + 1]
    except ValueError:
        return None


def iterate_rows(node: Node, read: BucketReader) -> Iterator[tuple[bytes, bytes]]:
    """Keys and encoded values, by path."""
    for bucket in buckets(node):
        yield from _pairs(bucket_items(bucket, read))


def _pairs(rows: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(rows[::2], rows[1::2], strict=True)


def buckets(node: Node) -> Iterator[Bucket]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if len(node) == 5:
            waiting += (node[4], node[3])
        else:
            yield node


def rows_of(node: Node, read: BucketReader) -> list[Row]:
    """By path."""
    pairs = [pair for bucket in buckets(node) for pair in _pairs(bucket_items(bucket, read))]
    return [(_sha256(key).digest(), key, value) for key, value in pairs]


# Changing ----------------------------------------------------------------------------------------------------------------


def apply_changes(node: Node, changes: Sequence[RowChange], read: BucketReader, depth: int = 0) -> Node:
    """The tree after `changes`, which ascend by path, each path once. What is not changed is the very same."""
    if not changes:
        return node
    if node is None or len(node) != 5:
        return _bucket_changed(node, changes, read, depth)
    if len(changes) == 1:
        return _one_changed(node, changes, read, depth)
    half = split_index(changes, depth)
    left, right = node[3], node[4]
    if half:
        left = apply_changes(left, changes[:half], read, depth + 1)
    if half < len(changes):
        right = apply_changes(right, changes[half:], read, depth + 1)
    return node if left is node[3] and right is node[4] else join_nodes(left, right, read)


def _one_changed(node: Node, changes: Sequence[RowChange], read: BucketReader, depth: int) -> Node:
    """The same for one change. Below the first levels most are alone."""
    path, way = changes[0][0], list[Branch]()
    while node is not None and len(node) == 5:
        way.append(node)
        node = node[4] if path[depth >> 3] >> (7 - (depth & 7)) & 1 else node[3]
        depth += 1
    after = _bucket_changed(node, changes, read, depth)
    if after is node:
        return way[0]
    for above in reversed(way):
        after = join_nodes(after, above[4], read) if above[3] is node else join_nodes(above[3], after, read)
        node = above
    return after


def _bucket_changed(node: Bucket | None, changes: Sequence[RowChange], read: BucketReader, depth: int) -> Node:
    data = bucket_items(node, read) if node is not None else []
    known_paths, known_hashes = _hashed(node[0], data) if node is not None else ((), ())
    paths, hashes, differs = list(known_paths), list(known_hashes), False
    for path, key, value in changes:
        place = bisect_left(paths, path)
        row = slice(2 * place, 2 * place + 2)
        if not (place < len(paths) and paths[place] == path):
            if value is not None:
                paths.insert(place, path)
                hashes.insert(place, row_hash(path, value))
                data[row.start : row.start] = (key, value)
                differs = True
        elif value is None:
            del paths[place], hashes[place], data[row]
            differs = True
        elif data[row.start + 1] != value:
            hashes[place], data[row.start + 1] = row_hash(path, value), value
            differs = True
    return _built(paths, hashes, data, depth) if differs else node


def _hashed(bucket: bytes, data: Sequence[bytes]) -> BucketHashes:
    """The paths of a bucket's rows, and their hashes."""
    found = _recent.pop(bucket, None)  # what it is changed into takes its place
    if found is None:
        paths = [_sha256(key).digest() for key in data[::2]]
        values = zip(paths, data[1::2], strict=True)
        found = paths, [_sha256(_ROW + path + _sha256(value).digest()).digest() for path, value in values]
    return found


def build_tree(rows: Sequence[Row], depth: int = 0) -> Node:
    """The subtree at `depth` of these rows, which ascend by path."""
    paths = [row[0] for row in rows]
    hashes = [row_hash(path, value) for path, _, value in rows]
    return _built(paths, hashes, [part for _, key, value in rows for part in (key, value)], depth)


def _built(paths: Sequence[bytes], hashes: Sequence[bytes], data: Sequence[bytes], depth: int) -> Node:
    if not paths:
        return None
    if len(paths) > BUCKET_ROWS_MAX:
        half = bisect_left(paths, 1, key=lambda path: goes_right(path, depth))
        left = _built(paths[:half], hashes[:half], data[: 2 * half], depth + 1)
        return make_branch(left, _built(paths[half:], hashes[half:], data[2 * half :], depth + 1))
    hash, size = fold_hashes(paths, hashes, depth), sum(map(len, data)) + ROW_HEADS_BYTES * len(paths)
    _recent[hash] = (paths, hashes)
    if len(_recent) > HASHED_MAX:
        _recent.popitem(last=False)
    return hash, len(paths), size, codec.pack(data)


def join_nodes(left: Node, right: Node, read: BucketReader) -> Node:
    """A branch of two halves, or one bucket if they fit into one: it never matters what stood there before."""
    if left is None:
        if right is None or right[1] == 1:
            return right
        hash, rows, size = _sha256(_BRANCH + EMPTY + right[0]).digest(), right[1], right[2]
    elif right is None:
        if left[1] == 1:
            return left
        hash, rows, size = _sha256(_BRANCH + left[0] + EMPTY).digest(), left[1], left[2]
    else:
        hash, rows, size = _sha256(_BRANCH + left[0] + right[0]).digest(), left[1] + right[1], left[2] + right[2]
    if rows > BUCKET_ROWS_MAX:
        return hash, rows, size, left, right
    data = [part for half in (left, right) for bucket in buckets(half) for part in bucket_items(bucket, read)]
    return hash, rows, size, codec.encode(data)


def fold_hashes(paths: Sequence[bytes], hashes: Sequence[bytes], depth: int) -> bytes:
    """The hash of a subtree at `depth`, from the hashes of its rows."""
    if len(paths) < 2:
        return hashes[0] if hashes else EMPTY
    return _fold(paths, hashes, depth, 0, len(paths))


def _fold(paths: Sequence[bytes], hashes: Sequence[bytes], depth: int, low: int, high: int) -> bytes:
    """Of the rows from `low` up to before `high`, which are at least two.

    This is where a block spends most of its time: what is one row or none is not worth a call.
    """
    byte, mask = depth >> 3, 0x80 >> (depth & 7)
    half = low
    while half < high and not paths[half][byte] & mask:
        half += 1
    if half == low:
        return _sha256(_BRANCH_EMPTY + _fold(paths, hashes, depth + 1, low, high)).digest()
    if half == high:
        return _sha256(_BRANCH + _fold(paths, hashes, depth + 1, low, high) + EMPTY).digest()
    left = hashes[low] if half == low + 1 else _fold(paths, hashes, depth + 1, low, half)
    right = hashes[half] if half == high - 1 else _fold(paths, hashes, depth + 1, half, high)
    return _sha256(_BRANCH + left + right).digest()


def split_index(items: Sequence[tuple[bytes, *tuple[Any, ...]]], depth: int) -> int:
    """How many of these go left. They begin with a path, ascend by it, and agree in the bits above `depth`."""
    return bisect_left(items, 1, key=lambda item: goes_right(item[0], depth))
