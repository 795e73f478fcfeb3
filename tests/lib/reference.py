"""What a reduction must give, bit for bit, written from bps(7), VALUES alone and in another language than the code.

Arrays are numpy arrays of storage type: bfloat16 travels as uint16 bit patterns. reduce(contributions, layout, ...) takes
one array a rank, in rank order.
"""
import functools, os

import numpy as np

FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, INT32, INT16, INT8, UINT8, BOOL = range(1, 11)
SUM, AVERAGE, MIN, MAX = range(1, 5)
NAMES = {FLOAT64: 'float64', FLOAT32: 'float32', FLOAT16: 'float16', BFLOAT16: 'bfloat16', INT64: 'int64',
         INT32: 'int32', INT16: 'int16', INT8: 'int8', UINT8: 'uint8', BOOL: 'bool'}
STORAGE = {FLOAT64: np.float64, FLOAT32: np.float32, FLOAT16: np.float16, BFLOAT16: np.uint16, INT64: np.int64,
           INT32: np.int32, INT16: np.int16, INT8: np.int8, UINT8: np.uint8, BOOL: np.uint8}
FLOATS = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)
CANONICAL = {FLOAT64: (np.uint64, 0x7ff8000000000000), FLOAT32: (np.uint32, 0x7fc00000),
             FLOAT16: (np.uint16, 0x7e00), BFLOAT16: (np.uint16, 0x7fc0)}
SIZE = {d: np.dtype(t).itemsize for d, t in STORAGE.items()}


def widen(dtype, x):
    """The type in which elements are added."""
    if dtype == FLOAT16:
        return x.astype(np.float32)
    if dtype == BFLOAT16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    if dtype == BOOL:
        return x != 0
    return x


def narrow(dtype, x):
    """Back to storage: one rounding, canonical NaNs."""
    if dtype == FLOAT16:
        out = x.astype(np.float16)
    elif dtype == BFLOAT16:
        bits = x.view(np.uint32).astype(np.uint64)
        out = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    elif dtype == BOOL:
        return x.astype(np.uint8)
    else:
        out = x.copy()
    if dtype in FLOATS:
        bits_type, pattern = CANONICAL[dtype]
        out.view(bits_type)[np.isnan(x)] = pattern
    return out


def fold(dtype, reduction, arrays):
    """Left to right, in the wide type."""
    total = arrays[0].copy()
    for x in arrays[1:]:
        if reduction in (SUM, AVERAGE):
            total = total | x if dtype == BOOL else total + x
        elif dtype == BOOL:
            total = total & x if reduction == MIN else total | x
        else:
            better = x < total if reduction == MIN else x > total
            if dtype in FLOATS:
                better = (better | np.isnan(x)) & ~np.isnan(total)
            total = np.where(better, x, total)
    return total


def divide(dtype, x, n, scale):
    if dtype in (FLOAT64,):
        return x / np.float64(n)
    if dtype in FLOATS:
        return x / np.float32(n / scale)
    return (x // n).astype(STORAGE[dtype])


def is_exact(dtype, reduction):
    """Averages of integers, whose sums do not wrap."""
    return reduction == AVERAGE and dtype not in FLOATS


def exact(dtype, x):
    return x.astype(object if dtype == INT64 else np.int64)


def fitting(dtype, reduction, x, bits=3):
    """Of x, what 2^bits contributions of a node can average through servers: their sum is a number of its type."""
    return x >> bits if is_exact(dtype, reduction) else x


def scale_of(dtype, reduction, layout):
    """What sums of nodes are divided by: for averages of float16, the least power of two that is no less than the ranks of any."""
    return 1 << (max(layout) - 1).bit_length() if dtype == FLOAT16 and reduction == AVERAGE else 1


def scaled(total, scale):
    return total if scale == 1 else total / np.float32(scale)


@np.errstate(all='ignore')
def reduce(dtype, reduction, contributions, layout):
    """layout[k]: ranks on node k; ranks are numbered node by node."""
    if is_exact(dtype, reduction):
        return divide(dtype, sum(exact(dtype, x) for x in contributions), sum(layout), 1)
    partials, at, scale = [], 0, scale_of(dtype, reduction, layout)
    for local_size in layout:
        ranks = [widen(dtype, x) for x in contributions[at:at + local_size]]
        partials.append(narrow(dtype, scaled(fold(dtype, reduction, ranks), scale)))
        at += local_size
    total = fold(dtype, reduction, [widen(dtype, p) for p in partials])
    if reduction == AVERAGE:
        total = divide(dtype, total, sum(layout), scale)
    return narrow(dtype, total)


@np.errstate(all='ignore')
def reduce_rows(dtype, reduction, contributions, layout):
    """push_pull_rows: contributions are (rows, values) of each rank, values of shape (len(rows), width). Returns the rows of
    the result, ascending, and their values."""
    width, partials, at, scale = contributions[0][1].shape[1], [], 0, scale_of(dtype, reduction, layout)
    for local_size in layout:
        ranks = contributions[at:at + local_size]
        rows = np.concatenate([rows for rows, _ in ranks])
        values = np.concatenate([exact(dtype, values) if is_exact(dtype, reduction) else widen(dtype, values)
                                 for _, values in ranks])
        rows, total = fold_rows(dtype, reduction, rows, values)
        if not is_exact(dtype, reduction):
            total = widen(dtype, narrow(dtype, scaled(total, scale)))
        partials.append((rows, total))
        at += local_size
    rows, total = fold_rows(dtype, reduction, *map(np.concatenate, zip(*partials)))
    if reduction == AVERAGE:
        total = divide(dtype, total, sum(layout), scale)
    return rows, narrow(dtype, total).reshape(len(rows), width)


def fold_rows(dtype, reduction, rows, values):
    """Adds up the values of each row left to right: in turn k, the k-th value of each row that has so many is added to its total."""
    found, inverse = np.unique(rows, return_inverse=True)
    order = np.argsort(inverse, kind='stable')
    begins = np.searchsorted(inverse[order], np.arange(len(found)))
    ends = np.append(begins[1:], len(rows))
    total = values[order[begins]]
    for k in range(1, max(ends - begins, default=0)):
        more = np.flatnonzero(begins + k < ends)
        total[more] = fold(dtype, reduction, [total[more], values[order[begins[more] + k]]])
    return found, total


POOL = 65521


def random(dtype, n, seed):
    """Values of all sizes, with infinities, NaNs of several payloads, denormals and both zeros mixed in: a pool of them, laid end
    to end from a place that the seed chooses. The length of the pool is a prime, so that no two parts of a tensor are alike."""
    return np.resize(np.roll(pool(dtype), np.random.default_rng(seed).integers(POOL)), n)


@functools.cache
def pool(dtype):
    rng = np.random.default_rng((dtype, int(os.environ.get('BPS_SEED', '0'))))
    if dtype == BOOL:
        return rng.integers(0, 3, POOL).astype(np.uint8)
    storage = STORAGE[dtype]
    if dtype not in FLOATS:
        info = np.iinfo(storage)
        return rng.integers(info.min, info.max, POOL, dtype=storage, endpoint=True)
    x = (rng.standard_normal(POOL) * np.exp2(rng.integers(-12, 12, POOL))).astype(np.float32)
    x = narrow(dtype, x.astype(np.float64) if dtype == FLOAT64 else x)
    bits_type = CANONICAL[dtype][0]
    bits = x.view(bits_type)
    width = bits.dtype.itemsize * 8
    wild = rng.random(POOL) < 0.1  # any bit pattern at all: denormals, huge numbers, NaNs with payloads
    bits[wild] = rng.integers(0, 2 ** width, int(wild.sum()), dtype=np.uint64).astype(bits_type)
    exponent = {FLOAT64: 0x7ff << 52, FLOAT32: 0xff << 23, FLOAT16: 0x1f << 10, BFLOAT16: 0xff << 7}[dtype]
    sign = 1 << (width - 1)
    specials = np.array([0, sign, 1, sign | 1, exponent, sign | exponent, exponent | 1, sign | exponent | 5], bits_type)
    some = rng.random(POOL) < 0.05
    bits[some] = rng.choice(specials, int(some.sum()))
    return x
