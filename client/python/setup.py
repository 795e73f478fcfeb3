"""Builds the package; pyproject.toml says what it is.

BPS_BUNDLE_DIR, a build folder or an installation of bps, puts its libraries and programs into the wheel, which then is for
this kind of machine only. Without it the wheel is pure Python and finds the library in the system.
"""

import os
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

BUNDLED = ("libbps_client.so.0", "libbps_jax.so", "libbps_tensorflow.so", "bps-daemon", "bpsctl")


def find(top, name):
    for folder, _, files in os.walk(top):
        if name in files:
            return os.path.join(folder, name)
    raise SystemExit(f"BPS_BUNDLE_DIR: there is no {name} in {top}")


class BuildPy(build_py):
    def run(self):
        super().run()
        target = os.path.join(self.build_lib, "bps", "_bundled")
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build in the same folder
        top = os.environ.get("BPS_BUNDLE_DIR")
        if top:
            os.makedirs(target)
            for name in BUNDLED:
                shutil.copy(find(top, name), os.path.join(target, name))


class BdistWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not os.environ.get("BPS_BUNDLE_DIR")

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
