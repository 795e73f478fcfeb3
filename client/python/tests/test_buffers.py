"""What kinds of objects are taken, and what is made like them."""

import array

import pytest

from bps._buffers import Tensor
from bps._library import DType
from bps._ops import tensor_name

numpy = pytest.importorskip("numpy")


@pytest.mark.parametrize("dtype", [t for t in DType if t != DType.BFLOAT16])
def test_numpy_types(dtype):
    x = numpy.ones((3, 2), dtype.name.lower())
    tensor = Tensor(x)
    assert (tensor.dtype, tensor.span.count, tensor.rows, tensor.row) == (dtype, 6, 3, 2)
    assert tensor.span.address == x.ctypes.data
    like = tensor.like(5)
    assert like.object.shape == (5, 2) and like.object.dtype == x.dtype


@pytest.mark.parametrize(
    "code, dtype", list(zip("bhilqBfd", "INT8 INT16 INT32 INT64 INT64 UINT8 FLOAT32 FLOAT64".split()))
)
def test_array_types(code, dtype):
    x = array.array(code, [1, 2, 3])
    tensor = Tensor(x)
    assert (tensor.dtype.name, tensor.span.count) == (dtype, 3)
    assert tensor.span.address == x.buffer_info()[0]
    like = tensor.like(2).object
    assert (like.typecode, len(like)) == (code, 2)


def test_bytes_and_views():
    assert Tensor(b"abc").dtype == DType.UINT8
    assert isinstance(Tensor(b"abc").like().object, bytearray)
    view = memoryview(bytearray(24)).cast("f", (3, 2))
    like = Tensor(view).like(4).object
    assert (like.format, like.shape) == ("f", (4, 2))
    assert Tensor(memoryview(bytearray(3)).cast("?")).dtype == DType.BOOL
    assert Tensor(bytearray()).span.count == 0
    assert Tensor(array.array("f")).like(0).object == array.array("f")


def test_what_is_not_contiguous_is_copied_in_but_not_out():
    x = numpy.arange(6, dtype=numpy.float32).reshape(2, 3).T
    tensor = Tensor(x)
    assert tensor.span.address != x.ctypes.data
    with pytest.raises(TypeError, match="contiguous"):
        Tensor(x, writable=True)


@pytest.mark.parametrize(
    "x, words",
    [
        (numpy.ones(2, ">f4"), "no element type for a NumPy array of >f4"),
        (numpy.ones(2, "complex64"), "complex64"),
        (numpy.ones(2, "uint16"), "uint16"),
        (array.array("I", [1]), "format 'I'"),
        ([1.0], "list has no buffer"),
        (1.0, "float has no buffer"),
    ],
)
def test_what_is_not_taken(x, words):
    with pytest.raises(TypeError, match=words):
        Tensor(x)


@pytest.mark.parametrize("x", [b"abc", memoryview(b"abc")])
def test_read_only_is_no_output(x):
    with pytest.raises(TypeError, match="writable"):
        Tensor(x, writable=True)
    frozen = numpy.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        Tensor(frozen, writable=True)


def test_the_buffer_is_held():
    x = bytearray(8)
    tensor = Tensor(x)
    with pytest.raises(BufferError):
        x.append(1)
    del tensor
    x.append(1)


def test_names_without_a_name_depend_on_nothing_but_the_kind():
    assert tensor_name("push_pull", "x", DType.FLOAT32, (5,)) == "push_pull.x"
    assert tensor_name("push_pull", None, DType.FLOAT32, (5,)) == "push_pull.noname.float32.5"
    assert tensor_name("push_pull", None, DType.FLOAT32, (2, 3)) == "push_pull.noname.float32.2x3"
