"""What a NumPy array, an array.array, a bytearray or a memoryview is to bps, and how to make another like it."""

import array
import ctypes
import sys

from ._library import SIZES, DType
from ._ops import Span

_BY_NUMPY_NAME = {t.name.lower(): t for t in DType}
_BY_NUMPY_NAME["bool_"] = DType.BOOL
_FLOATS = {2: DType.FLOAT16, 4: DType.FLOAT32, 8: DType.FLOAT64}
_INTEGERS = {1: DType.INT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}
_UNSIGNED = ("H", "I", "L", "Q")


def _is_numpy(x):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def _no_type(what):
    return TypeError(f"bps has no element type for {what}; there are: {', '.join(t.name.lower() for t in DType)}")


def _dtype_of_view(view, moves):
    code = view.format.lstrip("@=")
    if code in ("f", "d", "e"):
        return _FLOATS[view.itemsize]
    if code in ("b", "h", "i", "l", "q"):
        return _INTEGERS[view.itemsize]
    if code in ("B", "c"):
        return DType.UINT8
    if code == "?":
        return DType.BOOL
    if code in _UNSIGNED and moves:
        return _INTEGERS[view.itemsize]
    raise _no_type(f"items of format {view.format!r}")


class Tensor:
    """An object of the caller and where its elements are. moves: for an operation that only moves, so that an element of a type that bps
    does not know is `pieces` of one that it knows.
    """

    def __init__(self, x, writable=False, moves=False):
        self.object = x
        self.moves = moves
        self.pieces = 1
        if _is_numpy(x):
            self._describe_numpy(x, writable)
        else:
            self._describe_buffer(x, writable)

    def _describe_numpy(self, x, writable):
        self.shape = x.shape
        self.dtype = _BY_NUMPY_NAME.get(x.dtype.name) if x.dtype.isnative else None
        if self.dtype is None and self.moves and not x.dtype.hasobject and x.dtype.itemsize:
            self.dtype = _INTEGERS.get(x.dtype.itemsize, DType.UINT8)
            self.pieces = x.dtype.itemsize // SIZES[self.dtype]
        if self.dtype is None:
            raise _no_type(f"a NumPy array of {x.dtype.str} ({x.dtype.name})")
        if writable and not x.flags.writeable:
            raise TypeError("the array is read-only")
        if not x.flags.c_contiguous:
            if writable:
                raise TypeError("an output array must be contiguous")
            x = x.copy(order="C")
        shape = self.shape if self.pieces == 1 else (*self.shape, self.pieces)
        self.span = Span(x.ctypes.data, self.dtype, x.size * self.pieces, x, shape=shape)

    def _describe_buffer(self, x, writable):
        try:
            view = memoryview(x)
        except TypeError:
            raise TypeError(
                f"{type(x).__name__} has no buffer of elements; bps takes NumPy arrays, array.array, bytearray and "
                "memoryview, and bps.torch takes tensors"
            ) from None
        self.shape = view.shape
        self.dtype = _dtype_of_view(view, self.moves)
        count = view.nbytes // view.itemsize
        if writable and (view.readonly or not view.c_contiguous):
            raise TypeError("an output must be writable and contiguous")
        if view.readonly or not view.c_contiguous:
            view = memoryview(bytearray(view.tobytes()))
        if count == 0:
            self.span = Span(None, self.dtype, 0, x, shape=self.shape)
            return
        owner = (ctypes.c_char * view.nbytes).from_buffer(view)  # keeps x and, where it can be resized, its size
        self.span = Span(ctypes.addressof(owner), self.dtype, count, owner, shape=self.shape)

    @property
    def rows(self):
        return self.shape[0] if self.shape else 1

    @property
    def row(self):
        """Elements of one row: of everything but the first dimension."""
        n = self.pieces
        for extent in self.shape[1:]:
            n *= extent
        return n

    def like(self, rows=None):
        """A new Tensor of the same kind, with as many rows."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        x = self.object
        if _is_numpy(x):
            return Tensor(sys.modules["numpy"].empty(shape, x.dtype), writable=True, moves=self.moves)
        count = 1
        for extent in shape:
            count *= extent
        data = bytes(count * SIZES[self.dtype])
        if isinstance(x, array.array):
            return Tensor(array.array(x.typecode, data), writable=True, moves=self.moves)
        data = bytearray(data)
        if isinstance(x, (bytes, bytearray)):
            return Tensor(data, writable=True)
        if not count:
            return Tensor(memoryview(data), writable=True)
        code = memoryview(x).format.lstrip("@=")
        flat = memoryview(data) if code == "B" and len(shape) == 1 else memoryview(data).cast(code, shape)
        return Tensor(flat, writable=True, moves=self.moves)
