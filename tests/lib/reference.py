"""What a reduction must give, bit for bit, written from bps(7) VALUES alone and in another language than the code.

Arrays are numpy arrays of storage type: bfloat16 travels as uint16 bit patterns. reduce(contributions, layout, ...) takes
one array a rank, in rank order.
"""
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


def divide(dtype, x, n):
    if dtype in (FLOAT64,):
        return x / np.float64(n)
    if dtype in FLOATS:
        return x / np.float32(n)
    return (x.astype(object) // n).astype(x.dtype) if dtype == INT64 else (x.astype(np.int64) // n).astype(x.dtype)


def reduce(dtype, reduction, contributions, layout):
    """layout[k]: ranks on node k; ranks are numbered node by node."""
    with np.errstate(all='ignore'):
        partials, at = [], 0
        for local_size in layout:
            ranks = [widen(dtype, x) for x in contributions[at:at + local_size]]
            partials.append(narrow(dtype, fold(dtype, reduction, ranks)))
            at += local_size
        total = fold(dtype, reduction, [widen(dtype, p) for p in partials])
        if reduction == AVERAGE:
            total = divide(dtype, total, sum(layout))
        return narrow(dtype, total)


def reduce_rows(dtype, reduction, contributions, layout):
    """push_pull_rows: contributions are (rows, values) of each rank, values of shape (len(rows), width). Returns the rows of
    the result, ascending, and their values."""
    with np.errstate(all='ignore'):
        given, at = {}, 0  # row: {node: what its ranks gave for it, in their order}
        for node, local_size in enumerate(layout):
            for rows, values in contributions[at:at + local_size]:
                for row, value in zip(rows.tolist(), values):
                    given.setdefault(row, {}).setdefault(node, []).append(widen(dtype, value))
            at += local_size
        result = []
        for row in sorted(given):
            partials = [narrow(dtype, fold(dtype, reduction, given[row][node])) for node in sorted(given[row])]
            total = fold(dtype, reduction, [widen(dtype, p) for p in partials])
            if reduction == AVERAGE:
                total = divide(dtype, total, sum(layout))
            result.append(narrow(dtype, total))
    width = contributions[0][1].shape[1]
    return np.array(sorted(given), np.int64), np.array(result, STORAGE[dtype]).reshape(len(given), width)


def random(dtype, n, seed):
    """Values of all sizes, with infinities, NaNs of several payloads, denormals and both zeros mixed in."""
    rng = np.random.default_rng(seed)
    if dtype == BOOL:
        return rng.integers(0, 3, n).astype(np.uint8)
    storage = STORAGE[dtype]
    if dtype not in FLOATS:
        info = np.iinfo(storage)
        return rng.integers(info.min, info.max, n, dtype=storage, endpoint=True)
    x = (rng.standard_normal(n) * np.exp2(rng.integers(-12, 12, n))).astype(np.float32)
    x = narrow(dtype, x.astype(np.float64) if dtype == FLOAT64 else x)
    bits_type = CANONICAL[dtype][0]
    bits = x.view(bits_type)
    width = bits.dtype.itemsize * 8
    wild = rng.random(n) < 0.1  # any bit pattern at all: denormals, huge numbers, NaNs with payloads
    bits[wild] = rng.integers(0, 2 ** width, int(wild.sum()), dtype=np.uint64).astype(bits_type)
    exponent = {FLOAT64: 0x7ff << 52, FLOAT32: 0xff << 23, FLOAT16: 0x1f << 10, BFLOAT16: 0xff << 7}[dtype]
    sign = 1 << (width - 1)
    specials = np.array([0, sign, 1, sign | 1, exponent, sign | exponent, exponent | 1, sign | exponent | 5], bits_type)
    some = rng.random(n) < 0.05
    bits[some] = rng.choice(specials, int(some.sum()))
    return x
