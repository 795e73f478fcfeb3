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
from conftest import BUILD, PYTHON, TOP, clean_environment, needs_build

import bps
from bps import _install, _library
from bps._errors import error_from
from bps._library import SONAME

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
    ("torch", "bps.torch", "PyTorch 2.0 or later", "'torch>=2.0'"),
    ("tensorflow", "bps.tensorflow", "TensorFlow 2.13 or later", "'tensorflow>=2.13'"),
    ("jax", "bps.jax", "JAX 0.10.0 or later", "'jax>=0.10.0'"),
    ("keras", "bps.keras", "Keras 3", "'keras>=3'"),
    ("tf_keras", "bps.keras", "tf_keras, as TF_USE_LEGACY_KERAS is set", "tf-keras"),
]


def import_of(adapter, framework, stands_there):
    code = f"import sys, types; sys.modules[{framework!r}] = {stands_there}; import {adapter}"
    legacy = {"TF_USE_LEGACY_KERAS": 1} if framework == "tf_keras" else {}
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(**legacy), capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("framework, adapter, needs, package", MISSING, ids=[framework for framework, *_ in MISSING])
def test_an_adapter_without_its_framework_says_how_to_install_it(framework, adapter, needs, package):
    said = import_of(adapter, framework, None)
    assert said.startswith(f"ImportError: {adapter} needs {needs} (") and said.endswith(f"): pip install {package}")


def test_bps_torch_says_which_torch_it_needs():
    said = import_of("bps.torch", "torch", "types.SimpleNamespace(__version__='1.13.1+cpu')")
    assert said.startswith("ImportError: bps.torch needs PyTorch 2.0 or later") and "(this is 1.13.1+cpu)" in said


class Machine:
    """The package away from the source tree, and what it carries beside what the system has."""

    def __init__(self, folder):
        self.folder, self.system = folder, folder / "system"
        self.bundled = folder / "bps" / "_bundled"
        shutil.copytree(PYTHON / "bps", folder / "bps")
        self.system.mkdir()
        path = f"{self.command('bps-daemon').parent}:{self.command('bpsctl').parent}:{self.system}:/usr/bin:/bin"
        self.environment = clean_environment(PYTHONPATH=folder, PATH=path, LD_LIBRARY_PATH=self.system)
        for variable in ("BPS_LIBRARY", "BPS_DAEMON"):
            self.environment.pop(variable, None)

    def command(self, name):
        """As pip makes one of an entry point of the package."""
        path = self.folder / "environment" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\nimport sys\nfrom bps._programs import run\nsys.exit(run())\n")
        path.chmod(0o755)
        return path

    def has(self, folder, version, lacks="bps_nothing"):
        """Puts the library and the programs there, of that version. lacks: a function."""
        folder.mkdir(exist_ok=True)
        own = bps.__version__.encode() + b"\0"
        # bpsctl says its version as bps-daemon does, and is small.
        for path, *names in (("client/" + SONAME, SONAME), ("daemon/admin/bpsctl", "bps-daemon", "bpsctl")):
            built = (BUILD / path).read_bytes()
            assert built.count(b"\0" + own) == 1
            built = built.replace(b"\0" + own, b"\0" + version.encode().ljust(len(own), b"\0"))
            for name in names:
                (folder / name).write_bytes(built.replace(lacks.encode() + b"\0", lacks.upper().encode() + b"\0"))
                (folder / name).chmod(0o755)

    def run(self, *command):
        return subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60)

    def check_build(self):
        """What it says of each part that is here."""
        done = self.run(sys.executable, "-m", "bps.launch", "--check-build")
        return dict(re.findall(r"^    \[X\] (libbps_client|bps-daemon|bpsctl)  \((.*)\)$", done.stdout, re.M)), done

    def load(self):
        """Loads the library, and one that needs it. Returns what that says, and which are loaded in the end."""
        code = """if True:
            import bps, ctypes
            from bps import _library
            try:
                _library.library()
            except ImportError as error:
                print(error)
            else:
                ctypes.CDLL(_library.native_path("libbps_jax.so"))
                print(*{line.split()[-1] for line in open("/proc/self/maps") if "/libbps_" in line}, sep="\\n")"""
        return self.run(sys.executable, "-c", code).stdout.splitlines()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


OLD, NEW = "0.0", "9.9"
PARTS = {SONAME: "libbps-client0", "bps-daemon": "bps-daemon", "bpsctl": "bps-daemon"}  # and packages of Debian


@needs_build
@pytest.mark.parametrize("version", [bps.__version__, NEW])
def test_what_the_system_has_comes_first(machine, version):
    machine.has(machine.bundled, bps.__version__)
    machine.has(machine.system, version)
    shutil.copy(BUILD / "client" / "native" / "libbps_jax.so", machine.bundled)
    why = f"the system's, not older than this package's {bps.__version__}"
    said, done = machine.check_build()
    assert list(said.values()) == [f"{version}, {machine.system / name}: {why}" for name in PARTS], done
    assert machine.run(machine.folder / "environment" / "bpsctl", "--version").stdout == f"bpsctl {version}\n"
    assert sorted(machine.load()) == sorted([f"{machine.system / SONAME}", f"{machine.bundled / 'libbps_jax.so'}"])


@needs_build
def test_what_the_package_carries_is_taken_where_the_system_has_older(machine):
    machine.has(machine.bundled, bps.__version__)
    machine.has(machine.system, OLD)
    shutil.copy(BUILD / "client" / "native" / "libbps_jax.so", machine.bundled)
    said, done = machine.check_build()
    assert list(said.values()) == [
        f"{bps.__version__}, {machine.bundled / name}: the system's {machine.system / name.replace('bpsctl', 'bps-daemon')} is "
        f"{OLD}, older than this package's {bps.__version__}: apt-get install {package}"
        for name, package in PARTS.items()
    ], done
    assert machine.run(machine.folder / "environment" / "bpsctl", "--version").stdout == f"bpsctl {bps.__version__}\n"
    assert sorted(machine.load()) == [f"{machine.bundled / name}" for name in (SONAME, "libbps_jax.so")]


@needs_build
def test_what_the_package_carries_is_taken_where_the_system_has_none_or_a_broken_one(machine):
    machine.has(machine.bundled, bps.__version__)
    said, done = machine.check_build()
    assert list(said.values()) == [f"{bps.__version__}, {machine.bundled / name}: the system has none" for name in PARTS], done
    machine.has(machine.system, bps.__version__, lacks="bps_request_rows")
    (machine.system / "bps-daemon").write_bytes(b"\x7fELF of another kind of machine")
    said, done = machine.check_build()
    broken = f"{bps.__version__}, {machine.bundled}/{{0}}: the system's {machine.system}/{{0}} {{1}}: apt-get install {{2}}"
    assert said["libbps_client"] == broken.format(SONAME, f"is {bps.__version__} and has no bps_request_rows", "libbps-client0")
    assert said["bps-daemon"] == broken.format("bps-daemon", "does not say its version", "bps-daemon")
    (machine.system / "bps-daemon").write_text("#!/bin/sh\nexec bps-daemon\n")
    assert machine.check_build()[0]["bps-daemon"].endswith("/_bundled/bps-daemon: the system has none")


@needs_build
def test_a_package_that_carries_nothing(machine):
    machine.has(machine.system, OLD)
    older = f"is {OLD}, older than this package's {bps.__version__}: apt-get install"
    (said,) = machine.load()
    assert said == (
        f"bps {bps.__version__} carries no {SONAME}, and the system's {machine.system / SONAME} {older} libbps-client0"
    )
    done = machine.run(sys.executable, "-m", "bps.launch", "true")
    assert done.returncode == 1 and done.stderr.endswith(f"the system's {machine.system}/bps-daemon {older} bps-daemon\n")
    done = machine.run(machine.folder / "environment" / "bpsctl")
    assert done.returncode == 1 and done.stderr.endswith(f"the system's {machine.system}/bpsctl {older} bps-daemon\n")
    machine.has(machine.system, bps.__version__)
    said, done = machine.check_build()
    assert list(said) == ["libbps_client", "bps-daemon", "bpsctl"], done


def test_versions_are_numbers(monkeypatch):
    monkeypatch.setattr(_install, "__version__", "0.10.0")
    for version in ("0.10", "0.9.9", "0.9"):
        with pytest.raises(LookupError, match=f"^bps 0.10.0 .* /part is {version}, older .* 0.10.0: apt-get install it$"):
            _install.find("part", None, lambda name: ("/part", version, None), "it")
    for version in ("0.10.0", "0.10.1", "0.11", "1"):
        assert _install.find("part", None, lambda name: ("/part", version, None), "it")[0] == "/part"


def test_a_library_that_is_not_there(machine):
    (said,) = machine.load()
    assert said.startswith(f"bps {bps.__version__} carries no {SONAME}, and the system has none; install Debian's")
    assert said.endswith("scripts/deps build && pip install ./client/python")
    machine.environment["BPS_LIBRARY"] = "/no/lib.so"
    (said,) = machine.load()
    assert "$BPS_LIBRARY: /no/lib.so: cannot open shared object file" in said
    assert said.endswith("scripts/deps build && pip install ./client/python")


def test_a_build_folder_whose_link_leads_nowhere(tmp_path):
    package = tmp_path / "client" / "python"
    package.mkdir(parents=True)
    machine = Machine(package)
    (tmp_path / "client" / "bps.h").touch()
    (tmp_path / "build" / "client").mkdir(parents=True)
    (tmp_path / "build" / "client" / SONAME).symlink_to("libbps_client.so.0.1.0")
    assert "the system has none; install" in machine.load()[0]


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
