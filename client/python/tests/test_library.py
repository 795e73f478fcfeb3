"""Where the library is looked for, what its errors become, and that bps.h and _library.py say the same."""

import configparser
import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import PYTHON, TOP, clean_environment, needs_build

import bps
from bps import _library
from bps._errors import error_from

HEADER = (TOP / "client" / "bps.h").read_text()


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(**environment), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "enumeration, prefix",
    [(_library.DType, "BPS_"), (_library.Operation, "BPS_"), (_library.Reduction, "BPS_")],
)
def test_numbers_are_those_of_the_header(enumeration, prefix):
    for member in enumeration:
        assert re.search(rf"\b{prefix}{member.name} = {member.value}\b", HEADER), member


def c_type(declaration):
    if "*" in declaration:
        return ctypes.sizeof(ctypes.c_void_p)
    names = {"size_t": 8, "int64_t": 8, "uint64_t": 8, "uint32_t": 4, "int32_t": 4, "int": 4}
    return names[declaration.replace("const", "").split()[0]]


@pytest.mark.parametrize(
    "structure, name",
    [
        (_library.OpenParams, "bps_open_params"),
        (_library.JoinParams, "bps_join_params"),
        (_library.SubmitParams, "bps_submit_params"),
    ],
)
def test_structures_are_those_of_the_header(structure, name):
    body = re.search(rf"struct {name} {{(.*?)\n}};", HEADER, re.S)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    fields = [line.strip() for line in body.split(";") if line.strip()]
    names = [re.search(r"(\w+)$", field)[1] for field in fields]
    assert names == [field for field, _ in structure._fields_]
    assert [c_type(field) for field in fields] == [ctypes.sizeof(kind) for _, kind in structure._fields_]


def test_functions_are_those_of_the_header():
    declared = set(re.findall(r"\b(bps_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)))
    # The package takes sizes of types from a table.
    assert declared - set(_library._PROTOTYPES) == {"bps_dtype_size"}
    assert set(_library._PROTOTYPES) <= declared


def test_import_is_light():
    done = python(
        "import sys, bps, bps.launch; print([m for m in ('numpy', 'torch', 'bps.torch') if m in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


MISSING = [
    ("torch", "bps.torch", "bps.torch needs PyTorch 2.0 or later (pip install torch): "),
    ("tensorflow", "bps.tensorflow", "bps.tensorflow needs TensorFlow 2.13 or later (pip install 'tensorflow>=2.13'): "),
    ("jax", "bps.jax", "bps.jax needs JAX 0.10.0 or later (pip install 'jax>=0.10.0'): "),
    ("keras", "bps.keras", "bps.keras needs Keras 3 (pip install 'keras>=3'): "),
    ("tf_keras", "bps.keras", "bps.keras needs tf_keras, as TF_USE_LEGACY_KERAS is set (pip install tf-keras): "),
]


def import_of(adapter, framework, stands_there):
    code = f"import sys, types; sys.modules[{framework!r}] = {stands_there}; import {adapter}"
    legacy = {"TF_USE_LEGACY_KERAS": 1} if framework == "tf_keras" else {}
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(**legacy), capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("framework, adapter, words", MISSING, ids=[framework for framework, *_ in MISSING])
def test_an_adapter_without_its_framework_says_how_to_install_it(framework, adapter, words):
    assert import_of(adapter, framework, None).startswith(f"ImportError: {words}")


def test_bps_torch_says_which_torch_it_needs():
    said = import_of("bps.torch", "torch", "types.SimpleNamespace(__version__='1.13.1+cpu')")
    assert said.startswith("ImportError: bps.torch needs PyTorch 2.0 or later") and "this is 1.13.1" in said


def test_a_library_that_is_not_there(tmp_path):
    shutil.copytree(PYTHON / "bps", tmp_path / "bps")  # away from the source tree and its build folders
    environment = clean_environment(PYTHONPATH=tmp_path)
    environment.pop("BPS_LIBRARY", None)
    code = "import bps\ntry: bps.init()\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("cannot load libbps_client.so.0, the library of bps. Tried")
    assert "pip install ./client/python" in done.stdout and done.stdout.endswith("or set BPS_LIBRARY to it\n")
    done = python(code, BPS_LIBRARY="/no/lib.so")
    assert "$BPS_LIBRARY: /no/lib.so: cannot open shared object file" in done.stdout


def test_a_build_folder_whose_link_leads_nowhere(tmp_path):
    package = tmp_path / "client" / "python" / "bps"
    shutil.copytree(PYTHON / "bps", package)
    (tmp_path / "client" / "bps.h").touch()
    (tmp_path / "build" / "client").mkdir(parents=True)
    (tmp_path / "build" / "client" / "libbps_client.so.0").symlink_to("libbps_client.so.0.1.0")
    environment = clean_environment(PYTHONPATH=package.parent)
    environment.pop("BPS_LIBRARY", None)
    code = "import bps\ntry: bps.init()\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert "in a build folder: none" in done.stdout, done.stdout + done.stderr


def test_a_library_that_is_another():
    done = python("import bps\ntry: bps.init()\nexcept ImportError as error: print(error)", BPS_LIBRARY="libm.so.6")
    assert "libm.so.6 has no bps_error" in done.stdout


@needs_build
def test_no_daemon_is_said_at_once():
    code = "import bps\ntry: bps.init(connect_timeout=0)\nexcept bps.BpsConnectionError as error: print(error.errno, error)"
    done = python(code)
    number, _, text = done.stdout.partition(" ")
    assert int(number) == errno.ENOENT and "/nonexistent/bps.sock" in text, done.stdout + done.stderr


@needs_build
def test_bad_environment_is_named():
    done = python(
        "import bps\ntry: bps.init()\nexcept ValueError as error: print(error)", BPS_RANK="many", BPS_SIZE="2"
    )
    assert "BPS_RANK" in done.stdout, done.stdout + done.stderr


@needs_build
def test_unknown_argument_of_init_is_named():
    with pytest.raises(TypeError, match="'colour'.*rank, size"):
        bps.init(colour="blue")


def test_every_call_needs_init():
    calls = [
        bps.rank,
        bps.size,
        bps.barrier,
        lambda: bps.push_pull(bytearray(4)),
        lambda: bps.allgather(bytearray(4)),
        lambda: bps.broadcast_object(1),
        lambda: bps.alloc(10),
    ]
    for call in calls:
        with pytest.raises(bps.BpsNotInitializedError, match="init"):
            call()
    assert not bps.is_initialized()
    bps.shutdown()


@pytest.mark.parametrize(
    "number, builtin",
    [
        (errno.ETIME, TimeoutError),
        (errno.ECONNRESET, ConnectionError),
        (errno.ESHUTDOWN, ConnectionError),
        (errno.EINVAL, ValueError),
        (errno.ENOTCONN, RuntimeError),
        (errno.ENOMEM, OSError),
    ],
)
def test_errors_are_also_builtin_ones(number, builtin):
    error = error_from(-number, "rank 3 is missing")
    assert isinstance(error, bps.BpsError) and isinstance(error, builtin)
    assert (error.errno, error.strerror) == (number, "rank 3 is missing")
    assert error_from(-number, "").strerror == os.strerror(number)


def test_version_is_one():
    assert f'version = "{bps.__version__}"' in (PYTHON / "pyproject.toml").read_text()
    meson = (TOP / "meson.build").read_text()
    assert f"version: '{bps.__version__}'" in meson


def test_pure_wheel_and_bundle(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1")
    source = tmp_path / "source"
    shutil.copytree(PYTHON, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    tree = tmp_path / "tree"
    (tree / "lib").mkdir(parents=True)
    for name in ("libbps_client.so.0", "libbps_jax.so", "libbps_tensorflow.so"):
        (tree / "lib" / name).write_bytes(b"library")
    for program in ("bps-daemon", "bpsctl", "bps-bench"):
        (tree / program).write_bytes(program.encode())
        (tree / program).chmod(0o755)

    def wheel(**environment):
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "."]
        out = tmp_path / ("bundle" if environment else "pure")
        done = subprocess.run(
            [*command, "-w", out], cwd=source, env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = out.iterdir()
        listing = subprocess.run([sys.executable, "-m", "zipfile", "-l", path], capture_output=True, text=True).stdout
        return path, listing

    path, listing = wheel()
    assert path.name == f"bps-{bps.__version__}-py3-none-any.whl"
    assert "bps/torch/optimizer.py" in listing and "bps/_launch/agent.py" in listing and "_bundled" not in listing and "tests" not in listing
    path, listing = wheel(BPS_BUNDLE_DIR=str(tree))
    assert re.fullmatch(rf"bps-{re.escape(bps.__version__)}-py3-none-linux_\w+\.whl", path.name)
    bundled = ("libbps_client.so.0", "libbps_jax.so", "libbps_tensorflow.so", "bps-daemon", "bpsctl", "bps-bench")
    assert all(f"bps/_bundled/{name}" in listing for name in bundled)
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", installed, path]
    subprocess.run(command, check=True, capture_output=True)
    assert os.access(installed / "bps" / "_bundled" / "bps-daemon", os.X_OK)
    _, listing = wheel()  # in the same folder, after one that bundled
    assert "_bundled" not in listing


def test_a_source_tree_has_the_entry_points_of_the_package():
    entries, setup = configparser.ConfigParser(), (PYTHON / "setup.py").read_text()
    assert entries.read(PYTHON / "bps_source_tree.dist-info/entry_points.txt")
    assert entries.sections() == re.findall(r'"(torch\w*\.backends)"', setup)
    for group in entries.sections():
        for name, target in entries[group].items():
            assert f'"{group}": ["{name} = {target}"]' in setup
