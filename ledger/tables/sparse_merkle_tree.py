"""An immutable binary Merkle radix tree over SHA-256 of the keys.

It is the tree of Diem's state (Gao, Hu, Wu, "Jellyfish Merkle Tree", 2021, section 3), with two children of a branch. An empty
subtree has the hash `EMPTY`. A subtree of one row has the hash of that row, at any depth. A subtree of more rows has the hash
of its two halves. The root therefore depends only on the rows.

Buckets do not affect the root. A bucket is a subtree of at most `BUCKET_ROWS_MAX` rows that is in no larger such subtree. It is
read and written as a whole, and only the branches above the buckets stay in memory.
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

EMPTY: Final = bytes(32)  # hash of a subtree without rows: no known data have it
DEPTH_MAX: Final = 256  # bits of a path, and so the maximum depth of the tree
# Maximum number of rows in a bucket. Half this number would double the memory of branches. Twice this number would double the
# unchanged rows that a block hashes.
BUCKET_ROWS_MAX: Final = 16
ROW_HEADS_BYTES: Final = 6  # maximum number of bytes that the encoding of a row adds to its key and value

# Encodings of bounded rows have headers of one, two and three bytes.
assert ROW_KEY_BYTES_MAX < 1 << 8 and ROW_BYTES_MAX < 1 << 16

# Nodes are plain tuples, because Python's cycle collector skips tuples of objects that cannot form cycles. With objects of a
# class, a table of a million rows would stop the process for 0.2 seconds now and then.
# Hash, number of rows, size, and either the slot of a store or the data.
Bucket: TypeAlias = tuple[bytes, int, int, "int | bytes"]
Branch: TypeAlias = tuple[bytes, int, int, "Node", "Node"]  # hash, number of rows, size, left node, right node
Node: TypeAlias = "Branch | Bucket | None"  # None: a subtree without rows

Row: TypeAlias = tuple[bytes, bytes, bytes]  # path, key and encoded value
RowChange: TypeAlias = tuple[bytes, bytes, "bytes | None"]  # path, key and encoded value; None: the row is removed
BucketReader: TypeAlias = Callable[[int, bytes], bytes]  # function that reads the bucket with a given hash from a given slot

BucketHashes: TypeAlias = tuple[Sequence[bytes], Sequence[bytes]]  # paths and hashes of the rows in a bucket

# Cache of the hashes in `HASHED_MAX` buckets, about 8 MB, by bucket hash. A changed row soon changes again, because a task is
# started, answered and settled. The cache saves hashing the other rows of its bucket.
HASHED_MAX: Final = 4_096
_recent: OrderedDict[bytes, BucketHashes] = OrderedDict()

_sha256 = hashlib.sha256
_ROW, _BRANCH = b"folkmoot/row\x00", b"folkmoot/branch\x00"
_BRANCH_EMPTY = _BRANCH + EMPTY


def path_of(key: bytes) -> bytes:
    """Return the path of a key, which is its hash.

    Each bit is a step down from the root: 0 is left and 1 is right. The highest bit of the first byte comes first.
    """
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
    """Raise `StorageError`. This is the `BucketReader` of a tree whose buckets are all in memory."""
    raise StorageError("this table has rows on disk, but no store to read them from")


# Reading -----------------------------------------------------------------------------------------------------------------


def bucket_data(bucket: Bucket, read: BucketReader) -> bytes:
    place = bucket[3]
    return place if isinstance(place, bytes) else read(place, bucket[0])


def bucket_items(bucket: Bucket, read: BucketReader) -> list[bytes]:
    """Return key, value, key, value … of a bucket's rows, in order of their paths."""
    found: list[bytes] = codec.unpack(data := bucket_data(bucket, read), len(data))
    return found


def find_row(node: Node, read: BucketReader, key: bytes) -> bytes | None:
    """Return the encoded value of a key, or None if the key has no row."""
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
    """Yield the key and the encoded value of each row, in order of the paths."""
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
    """Return all rows of a subtree in order of their paths."""
    pairs = [pair for bucket in buckets(node) for pair in _pairs(bucket_items(bucket, read))]
    return [(_sha256(key).digest(), key, value) for key, value in pairs]


# Changing ----------------------------------------------------------------------------------------------------------------


def apply_changes(node: Node, changes: Sequence[RowChange], read: BucketReader, depth: int = 0) -> Node:
    """Return the tree after these `changes`, which ascend by path, each path once. Unchanged subtrees stay the same objects."""
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
    """Return the tree after one change, without recursion. Below the first levels, few subtrees have more than one change."""
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
    """Return the paths and the hashes of a bucket's rows, which are `data`. Removes the bucket from the cache."""
    found = _recent.pop(bucket, None)  # the changed bucket replaces this one in the cache
    if found is None:
        paths = [_sha256(key).digest() for key in data[::2]]
        values = zip(paths, data[1::2], strict=True)
        found = paths, [_sha256(_ROW + path + _sha256(value).digest()).digest() for path, value in values]
    return found


def build_tree(rows: Sequence[Row], depth: int = 0) -> Node:
    """Return a subtree with its root at `depth` of these rows, which ascend by path."""
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
    """Return a branch of two halves, or one bucket if their rows fit into it. The result depends only on the rows."""
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
    """Return the hash of a subtree with its root at `depth`, from the paths and hashes of its rows."""
    if len(paths) < 2:
        return hashes[0] if hashes else EMPTY
    return _fold(paths, hashes, depth, 0, len(paths))


def _fold(paths: Sequence[bytes], hashes: Sequence[bytes], depth: int, low: int, high: int) -> bytes:
    """Return the hash of a subtree with the rows in the interval from `low` to `high`. There are at least two rows.

    Blocks spend most of their time in this function, so it makes no call for one row or no row.
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
    """Return the number of items that belong to the left half of a subtree at `depth`.

    Items begin with a path, ascend by it, and agree in the first `depth` bits.
    """
    return bisect_left(items, 1, key=lambda item: goes_right(item[0], depth))
