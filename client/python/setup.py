"""Builds the package; pyproject.toml says what it is.

In the source tree of bps, the wheel carries the libraries and the programs, built by meson for this kind of machine:
pip install is all there is to do. BPS_BUNDLE_DIR, a build folder or an installation, takes them from there instead;
BPS_BUNDLE_DIR=none, or a copy of this folder by itself, makes a wheel of pure Python that uses those of the system.
"""

import os
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

PROGRAMS = ("bps-daemon", "bpsctl", "bps-bench")
LIBRARIES = ("libbps_client.so.0", "libbps_jax.so", "libbps_tensorflow.so")
TREE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
CHOSEN = os.environ.get("BPS_BUNDLE_DIR")
BUNDLES = CHOSEN != "none" and bool(CHOSEN or os.path.exists(os.path.join(TREE, "meson.build")))


def find(top, name):
    for folder, _, files in os.walk(top):
        if name in files:
            return os.path.join(folder, name)
    raise SystemExit(f"BPS_BUNDLE_DIR: there is no {name} in {top}")


def built():
    """The folder with what meson has built of the tree."""
    folder = os.path.join(TREE, "build-wheel")
    commands = [["ninja", "-C", folder]]
    if not os.path.exists(os.path.join(folder, "build.ninja")):
        options = ["--buildtype=release", "-Db_lto=true", "-Dtests=false", "-Dwerror=false"]
        commands.insert(0, ["meson", "setup", folder, TREE, *options])
    for command in commands:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            status, output = done.returncode, done.stdout
        except OSError as error:
            status, output = 1, f"{command[0]}: {error.strerror}"
        if status:
            raise SystemExit(
                f"{output[-3000:]}\nbps: {command[0]} could not build the daemon and the library. On Debian "
                f"{TREE}/scripts/deps build installs what that takes; elsewhere, what it lists. "
                "BPS_BUNDLE_DIR=none pip install ... makes a package without them."
            )
    return folder


class Package(Distribution):
    def has_ext_modules(self):
        return BUNDLES  # it goes where packages of one kind of machine go


class BuildPy(build_py):
    def run(self):
        super().run()
        target = os.path.join(self.build_lib, "bps", "_bundled")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build in the same folder
        if BUNDLES:
            top = CHOSEN or built()
            os.makedirs(target)
            for name in PROGRAMS + LIBRARIES:
                shutil.copy(find(top, name), os.path.join(target, name))


class BdistWheel(bdist_wheel):
    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


scripts = ["bpslaunch = bps.launch:main"]
if BUNDLES:
    scripts += [f"{name} = bps._programs:run" for name in PROGRAMS]
setup(
    distclass=Package,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
    entry_points={
        "console_scripts": scripts,
        # So that torch.distributed and torchcomms know the backend without an import.
        "torch.backends": ["bps = bps._torch_backend:register"],
        "torchcomms.backends": ["bps = bps.torchcomms"],
    },
)
