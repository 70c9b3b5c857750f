"""Compile the stand-in card into a virtual environment that has vLLM and torch: `python build.py FOLDER`.

The libraries of CUDA in FOLDER/venv are replaced; libcuda and NVML, which a driver brings, go to FOLDER/driver. A
function that no source here defines becomes a stub that answers 0, and names itself on stderr when CARD_TRACE is set.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
NVML = HERE.parents[1] / "fakes" / "nvml" / "libnvidia-ml.c"
PREFIXES = {
    "cublas": r"cublas(?!Lt)",
    "cublasLt": "cublasLt",
    "cudnn": "cudnn",
    "cufft": "cufft",
    "cufile": "cuFile",
    "cupti": "cupti",
    "curand": "curand",
    "cusolver": "cusolver",
    "cusparse": r"cusparse(?!Lt)",
    "cusparseLt": "cusparseLt",
    "nccl": "p?nccl",
    "nvJitLink": "(?:__)?nvJitLink",
    "nvrtc": "nvrtc",
    "nvshmem": "nvshmem",
    "nvshmem_host": "nvshmem",
}
STUB = """#include <stdio.h>
#include <stdlib.h>
static int note(const char *name) { return getenv("CARD_TRACE") ? fprintf(stderr, "stub %s\\n", name) * 0 : 0; }
"""
COMPILE = ("gcc", "-O1", "-shared", "-fPIC", "-w")


def run(*command: str | Path) -> str:
    """The output of a command; its error ends the build."""
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def list_symbols(library: Path, nm_option: str) -> Iterator[tuple[str, str]]:
    """The (name, version) of a library's dynamic symbols; `which` is nm's option."""
    for line in run("nm", "-D", nm_option, "--with-symbol-versions", library).splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version.lstrip("@")


def list_defined(source: Path, work: Path, *options: str) -> set[str]:
    """The functions that a C source defines."""
    object_file = work / f"{source.stem}.o"
    run("gcc", "-fPIC", "-w", "-c", *options, source, "-o", object_file)
    return {line.split()[-1] for line in run("nm", object_file).splitlines() if " T " in line}


def write_stubs(path: Path, names: Iterable[str]) -> Path:
    path.write_text(STUB + "".join(f'int {name}(void) {{ return note("{name}"); }}\n' for name in sorted(names)))
    return path


def write_versions(path: Path, symbols: Iterable[tuple[str, str]]) -> str:
    """A linker's version script, as the option that uses it."""
    versions: dict[str, list[str]] = {}
    for name, version in symbols:
        versions.setdefault(version, []).append(name)
    text = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items() if version)
    path.write_text(text)
    return f"-Wl,--version-script={path}" if text else ""


def build_runtime(site: Path, work: Path) -> Path:
    """libcudart, in place of the real one and of every copy that a wheel brings."""
    nvidia = site / "nvidia" / "cu13"
    library, real = nvidia / "lib" / "libcudart.so.13", work / "libcudart.real"
    if not real.exists():
        shutil.copy(library, real)
    include = f"-I{nvidia / 'include'}"
    ours = list_defined(HERE / "runtime.c", work, include) | list_defined(HERE / "card.c", work)
    stub_source = write_stubs(
        work / "runtime_rest.c", {name for name, _ in list_symbols(real, "--defined-only")} - ours - {"libcudart.so.13"}
    )
    script = work / "runtime.map"
    script.write_text("libcudart.so.13 { global: *; };\n")
    options = ("-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}", "-lpthread", "-ldl")
    run(*COMPILE, include, "-o", library, HERE / "runtime.c", HERE / "card.c", stub_source, *options)
    for copy in site.glob("*.libs/libcudart*.so.13*"):  # one state: the loader knows a file by its inode
        copy.unlink()
        copy.symlink_to(library)
    return library


def build_mathematics(site: Path, work: Path, runtime: Path) -> None:
    """The libraries that torch and vLLM link: cuBLAS, cuDNN, NCCL and so on."""
    users = [
        *(site / "torch" / "lib").glob("*.so"),
        *(path for name in ("vllm", "torchvision", "torchaudio") for path in (site / name).rglob("*.so")),
    ]
    symbols: dict[str, set[str]] = {}
    needed: set[str] = set()
    for user in users:
        needed |= set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^]]+)\]", run("readelf", "-d", user)))
        for name, version in list_symbols(user, "--undefined-only"):
            symbols.setdefault(name, set()).add(version)
    for soname in sorted(needed):
        match = re.match(r"lib([A-Za-z_]+)", soname)
        base = match[1] if match else ""
        if base in PREFIXES:
            mine = {
                (name, version)
                for name, versions in symbols.items()
                if re.match(PREFIXES[base], name)
                for version in versions
            }
            build_stub_library(runtime, soname, mine, work)
    nccl = next(site.glob("nvidia/nccl/lib/libnccl.so.2"), None)
    if nccl and not nccl.is_symlink():
        nccl.unlink()
        nccl.symlink_to(runtime.parent / "libnccl.so.2")


def build_stub_library(runtime: Path, soname: str, symbols: set[tuple[str, str]], work: Path) -> None:
    collectives = soname.startswith("libnccl")
    ours = list_defined(HERE / "collectives.c", work) if collectives else set()
    stub_source = write_stubs(work / f"{soname}.c", {name for name, _ in symbols} - ours)
    versions = write_versions(work / f"{soname}.map", symbols)
    sources = [HERE / "collectives.c", stub_source, runtime] if collectives else [stub_source]
    run(*COMPILE, "-o", runtime.parent / soname, *sources, f"-Wl,-soname,{soname}", *([versions] if versions else []))


def build_driver(site: Path, folder: Path, work: Path, runtime: Path) -> None:
    """libcuda with every function whose name is in torch, vLLM and Triton, and NVML."""
    files = [path for name in ("torch/lib", "vllm", "triton") for path in (site / name).rglob("*.so")]
    files.append(site / "triton" / "backends" / "nvidia" / "driver.c")
    names = {name.decode() for path in files for name in re.findall(rb"\bcu[A-Z][A-Za-z0-9_]{4,}\b", path.read_bytes())}
    other_libraries = re.compile("cu(?:blas|dnn|fft|rand|sparse|solver|File|da)")
    stub_source = write_stubs(
        work / "driver_rest.c",
        {name for name in names if not other_libraries.match(name)} - list_defined(HERE / "driver.c", work),
    )
    driver = folder / "driver"
    driver.mkdir(exist_ok=True)
    run(
        *COMPILE,
        "-o",
        driver / "libcuda.so.1",
        HERE / "driver.c",
        stub_source,
        runtime,
        "-Wl,-soname,libcuda.so.1",
        "-ldl",
    )
    run(*COMPILE, "-o", driver / "libnvidia-ml.so.1", NVML, "-Wl,-soname,libnvidia-ml.so.1", "-lpthread")


def main(folder: Path) -> None:
    """Replace the libraries under a folder that setup.sh has filled."""
    site = next((folder / "venv" / "lib").glob("python3*/site-packages"))
    work = folder / "build"
    work.mkdir(exist_ok=True)
    runtime = build_runtime(site, work)
    build_mathematics(site, work, runtime)
    build_driver(site, folder, work, runtime)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
