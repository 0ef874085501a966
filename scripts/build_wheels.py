"""Builds the wheels of a commit, for scripts/wheels.

    .venv-wheels/bin/python scripts/build_wheels.py [--output dist] [--only ARCHITECTURE]

A wheel is Python for any version, and beside it the CPU's kernels, which are loaded by ctypes and
need no interface of Python's. zig's clang compiles them for either architecture on either, against
glibc 2.28, with libc++ inside. Invariant: the same commit and the same tools give the same bytes.
It knows no kernels but by their entries in pyproject.toml.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = "commands", "server", "model", "cache", "configs"
ARCHITECTURES = "x86_64", "aarch64"
GLIBC = "2.28"
FLAGS_OF_OTHERS = {"x86_64": {"-march"}, "aarch64": {"-mavx2"}}
"""Beginnings of flags that are for the other architecture."""
AS_CLANG = {
    "-Wno-maybe-uninitialized": "-w",
    "-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod",
    "-march=armv8.2-a+dotprod+i8mm": "-mcpu=generic+v8_2a+dotprod+i8mm",
}
"""Flags of gcc -> zig's."""
EXTENSIONS = re.compile(r"^\[\[tool\.setuptools\.ext-modules\]\]\n(?:(?!\[).*\n)*", re.MULTILINE)
SETUP = """
import json
from pathlib import Path
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

class Binary(Distribution):
    def has_ext_modules(self):
        return True

class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", {platform!r}

    def write_wheelfile(self, folder, *others):
        super().write_wheelfile(folder, *others)
        boms = Path(folder, "sboms")
        boms.mkdir()
        (boms / "onehead.cdx.json").write_text({bill!r})

setup(distclass=Binary, cmdclass={{"bdist_wheel": Wheel}})
"""
"""The wheel's tags, and the list of what is inside that others wrote (PEP 770)."""


def git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def kernels_of(architecture: str, project: dict[str, Any]) -> list[dict[str, Any]]:
    """The extensions in a pyproject.toml that an architecture's compiler can make."""
    return [
        extension
        for extension in project["tool"]["setuptools"]["ext-modules"]
        if FLAGS_OF_OTHERS[architecture].isdisjoint(
            flag[:6] for flag in extension["extra-compile-args"]
        )
    ]


def bill_of_materials(tree: Path, own_version: str) -> str:
    """What a wheel holds that others wrote, in CycloneDX's form."""
    plot = re.search(r"v([0-9.]+)", (tree / "server/ui/vendor/uPlot.js").read_text()[:400])
    assert plot is not None, "server/ui/vendor/uPlot.js names no version"
    license_of_llvm = "Apache-2.0 WITH LLVM-exception"
    parts = (
        *(
            (name, f"zig {version('ziglang')}", license_of_llvm)
            for name in ("libc++", "libc++abi", "libunwind", "compiler-rt")
        ),
        ("uPlot", plot[1], "MIT"),
    )
    found = [
        {"type": "library", "name": name, "version": of, "licenses": [{"expression": terms}]}
        for name, of, terms in parts
    ]
    onehead = {"type": "application", "name": "onehead", "version": own_version}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return json.dumps(head | {"metadata": {"component": onehead}, "components": found}, indent=1)


def compile_kernels(tree: Path, architecture: str, extension: dict[str, Any]) -> None:
    """Compiles one of the kernels' versions to where it is looked for."""
    flags = [AS_CLANG.get(flag, flag) for flag in extension["extra-compile-args"]]
    command = [sys.executable, "-m", "ziglang", "c++", f"--target={architecture}-linux-gnu.{GLIBC}"]
    target = Path(*extension["name"].split(".")).with_suffix(".so")
    command += [*flags, "-fPIC", "-shared", "-s", *extension["sources"], "-o", str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{extension['name']} for {architecture}: {done.stderr}")


def build(architecture: str, commit: str, output: Path, progress: Progress) -> Path:
    """Builds a wheel of a commit. Returns its path."""
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        sources = git("archive", commit, *PACKAGES, "pyproject.toml", "README.md", "LICENSE")
        subprocess.run(["tar", "-x"], cwd=tree, input=sources, check=True)
        project = (tree / "pyproject.toml").read_text()
        described = tomllib.loads(project)
        own_version, kernels = described["project"]["version"], kernels_of(architecture, described)
        task = progress.add_task(architecture, total=len(kernels) + 1)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(partial(compile_kernels, tree, architecture), kernels):
                progress.advance(task)
        project = EXTENSIONS.sub("", project)
        native = 'model = ["pretrained/*", "devices/cpu/native/*.so"]'
        (tree / "pyproject.toml").write_text(project.replace('model = ["pretrained/*"]', native))
        setup = SETUP.format(platform=platform, bill=bill_of_materials(tree, own_version))
        (tree / "setup.py").write_text(setup)
        committed = git("log", "-1", "--format=%ct", commit).decode().strip()
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run(
            [*command, "--no-build-isolation", "--wheel-dir", str(output), str(tree)],
            check=True,
            env=os.environ | {"SOURCE_DATE_EPOCH": committed},
        )
        progress.advance(task)
    wheel = output / f"onehead-{own_version}-py3-none-{platform}.whl"
    said = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True
    )
    least = re.search(r'"manylinux_2_(\d+)_', said.stdout)
    if least is None or int(least[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"{wheel.name} needs more than {platform}: {said.stdout}{said.stderr}")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/wheels", description="the wheels of a commit")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--only", choices=ARCHITECTURES, help="one architecture; default: each")
    options = parser.parse_args()
    architectures = [options.only] if options.only else ARCHITECTURES
    commit = git("rev-parse", "HEAD").decode().strip()  # Others may commit meanwhile.
    with Progress() as progress:
        wheels = [build(each, commit, options.output, progress) for each in architectures]
    for wheel in wheels:
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
