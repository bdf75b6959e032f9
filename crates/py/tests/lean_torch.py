"""Installs torch without its GPU half: `python lean_torch.py WHEEL SITE_PACKAGES`.

The wheels of torch on the package index are built for NVIDIA GPUs: with what they depend on they take 4 to 7 GB of disk, on
machines without a GPU too. Tests on the CPU need a sixth of it. This script unpacks a wheel without the GPU libraries, and puts
in place of each a library that has the symbols the others ask for, and no code: a call would abort. torch then finds no GPU.
Headers and static libraries are left out as well. It needs a C compiler and binutils, as Rust's linker does.

For tests alone. Whoever uses Esker installs torch as it comes.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Libraries that the system has; every other one that is not in the wheel gets a stand-in.
SYSTEM = re.compile(r"lib(c|m|z|dl|rt|pthread|gcc_s|stdc\+\+|util)\.so|ld-linux")
# Symbols of Python, of the C++ library and of its runtime.
OTHERS = re.compile(r"_?Py|_Z(T[VTIS])?N?K?S[tsaiod]|_ZTVN10__cxxabi|_Z(nw|na|dl|da)|__")
# Functions that return a reference, which is written to at start.
REFERENCE = re.compile(r"get_gil_checker")
GPU_LIBRARY = re.compile(r"torch/lib/lib(torch_cuda|torch_nvshmem|c10_cuda|caffe2_nvrtc|nvfuser|cu|nv)[^/]*$")
LEFT_OUT = re.compile(r"torch/(include/|bin/protoc|test/|share/)|\.a$|^(functorch|caffe2)/")


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def needed(library):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", "-W", str(library)))


def undefined(library):
    """(name, version or None, file that the version belongs to or None, weak) of every symbol that others must have."""
    # Which file a version name comes from is in the table of versions.
    origin, file = {}, None
    for line in run("readelf", "-V", "-W", str(library)).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif match := re.search(r"Name: (\S+)\s+Flags", line):
            origin[match[1]] = file
    found = []
    for line in run("nm", "-D", "--undefined-only", str(library)).splitlines():
        kind, name = line.split()[-2:]
        name, _, version = name.partition("@")
        found.append((name, version.lstrip("@") or None, origin.get(version.lstrip("@")), kind in "wv"))
    return found


def defined(library):
    lines = run("nm", "-D", "--defined-only", str(library)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def stand_in(path, symbols):
    """Writes a library with these (name, version) symbols: functions that return 0, as registrations do at start; zeros for data."""
    versions = {}
    for name, version in symbols:
        versions.setdefault(version, []).append(name)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "a.s"), Path(folder, "a.map")
        names = sorted({name for name, _ in symbols})
        data = [name for name in names if name.startswith("_ZT")]
        label = '.globl "{0}"\n"{0}":'.format
        references = [name for name in names if REFERENCE.search(name)]
        lines = [".text", *map(label, set(names) - set(data) - set(references)), "xor %eax, %eax", "ret"]
        lines += [*map(label, references), "lea zeros(%rip), %rax", "ret", ".data", ".balign 64", "zeros:"]
        lines += [label(name) for name in data if not name.startswith("_ZTI")] + [".zero 4096"]
        for name in data:  # The type of a class, by which bindings are found: only its name matters.
            if name.startswith("_ZTI"):
                lines += [label(name), ".quad _ZTVN10__cxxabiv117__class_type_infoE + 16", ".quad 1f", f'1: .asciz "{name[4:]}"', ".balign 8"]
        lines += [ '.section .note.GNU-stack,"",@progbits', ""]
        source.write_text("\n".join(lines))
        blocks = [f"{version} {{ global: {' '.join(f'{chr(34)}{n}{chr(34)};' for n in names)} }};" for version, names in versions.items() if version]
        script.write_text("\n".join(blocks) + "\n")
        words = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
        run(*words, *([f"-Wl,--version-script={script}"] if blocks else []))


def unpack(wheel, target):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            if name.startswith(("torch/", "torchgen/", "torch-", "torch.libs/")) and not LEFT_OUT.search(name) and not GPU_LIBRARY.search(name):
                path = archive.extract(member, target)
                Path(path).chmod(member.external_attr >> 16 or 0o644)


def main(wheel, target):
    unpack(wheel, target)
    lib = Path(target, "torch/lib")
    kept = sorted(lib.glob("*.so*")) + sorted(Path(target, "torch").glob("_C*.so"))
    present = {path.name for path in kept}
    missing = sorted({name for path in kept for name in needed(path) if name not in present and not SYSTEM.match(name)})
    have = set().union(*(defined(path) for path in kept))
    versioned, plain = {}, set()
    for path in kept:
        for name, version, file, weak in undefined(path):
            if version is None and name not in have and not weak and not OTHERS.match(name):
                plain.add((name, None))
            elif file in missing:
                versioned.setdefault(file, set()).add((name, version))
    # Symbols without a version are found in any library: the first one has them all.
    for index, name in enumerate(missing):
        stand_in(lib / name, versioned.get(name, set()) | (plain if index == 0 else set()))
    print(f"torch without its GPU half: {len(missing)} libraries stand in, {len(plain)} symbols")


if __name__ == "__main__":
    main(*sys.argv[1:])
