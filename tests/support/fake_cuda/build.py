"""Make stand-ins for the libraries that a CUDA build of torch needs: `build.py ENVIRONMENT ROOT`.

`ENVIRONMENT` has torch in its site-packages, and headers in its folder `headers`. Each library gets all functions that
torch asks it for: those of the C files here, and for the rest empty ones. `ROOT` is the checkout, whose own environment
has all other packages.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from sysconfig import get_path
from typing import Final

HERE: Final = Path(__file__).parent
SITE: Final = Path(get_path("purelib")).relative_to(sys.prefix)

LIBRARIES: Final = {
    "libcublas.so.13": "cublas(?!Lt)",
    "libcublasLt.so.13": "cublasLt",
    "libcuda.so.1": "cu(?!sparseLt)[A-Z]|cu[A-Z]",
    "libcudart.so.13": "(__)?cuda",
    "libcudnn.so.9": "cudnn",
    "libcufile.so.0": "cuFile",
    "libcurand.so.10": "curand",
    "libcusolver.so.12": "cusolver",
    "libcusparse.so.12": "cusparse(?!Lt)",
    "libcusparseLt.so.0": "cusparseLt",
    "libnccl.so.2": "nccl",
    "libnvidia-ml.so.1": "nvml",
    "libnvrtc.so.13": "nvrtc",
}
"""Each library, and what the names of its functions begin with. Those with versions of symbols are found by these."""
VALUES: Final = {"cudnnGetVersion": 92000, "cublasLtGetVersion": 130002, "cudnnGetCudartVersion": 13000}
"""What empty functions return, if not 0."""
SOURCES: Final = {
    "libcublasLt.so.13": "cublaslt.c",
    "libcuda.so.1": "cuda.c",
    "libcudart.so.13": "cudart.c",
    "libnccl.so.2": "nccl.c",
    "libnvidia-ml.so.1": "nvml.c",
}
_ANY: Final = re.compile(r"(__)?(cu[A-Zdbfsr]|nccl|nvml|nvrtc|nvshmem)[A-Za-z_]")
_VERSION: Final = re.compile(r"lib(cu|nv).*\.so|NVSHMEM")
_SUFFIXED: Final = re.compile("cu(Mem|Ctx|Stream|Graph|Module|Link|Device|Event)")


def needed(libraries: Iterable[Path]) -> tuple[dict[str, set[str]], set[str]]:
    """Return the functions that libraries need: by the version of their symbols, and those without one."""
    versioned, plain = defaultdict[str, set[str]](set), set[str]()
    for library in libraries:
        listing = ["nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)]
        for line in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if _VERSION.match(version):
                versioned[version].add(name)
            elif _ANY.match(name) and not version:
                plain.add(name)
    return versioned, plain


def make(soname: str, version: str, names: set[str], headers: Path, out: Path) -> None:
    """Make one library."""
    source = HERE / SOURCES.get(soname, "none")
    text = source.read_text() if source.exists() else ""
    own = set(re.findall(r"^(?!static)[\w \*]*?\b(\w+)\(", text, re.MULTILINE)) | set(
        re.findall(r"^WAITS\((\w+)", text, re.MULTILINE)
    )
    empty = [
        f'const char *{name}(void) {{ return "fake"; }}'
        if re.search("(String|GetErrorName)$", name)
        else f"long {name}(void) {{ return {VALUES.get(name, 0)}; }}"
        for name in sorted(names - own)
    ]
    stubs, versions = out / f"{soname}.stubs.c", out / f"{soname}.map"
    stubs.write_text("\n".join(empty) + "\n")
    versions.write_text(f"{version} {{ global: *; }};\n")
    includes = [HERE / "include", headers / "nvidia/cu13/include", headers / "nvidia/nccl/include"]
    subprocess.run(
        ["gcc", "-w", "-O1", "-shared", "-fPIC", "-o", out / soname, f"-Wl,-soname,{soname}",
         f"-Wl,--version-script={versions}", *(f"-I{each}" for each in includes),
         stubs, *([source] if text else []), "-ldl", "-lrt", "-lpthread"],
        check=True,
    )  # fmt: skip
    stubs.unlink()
    versions.unlink()


def build(environment: Path, root: Path) -> None:
    """Make all libraries where torch looks for them first, and let each Python of the environment load them."""
    site, headers = environment / SITE, environment / "headers"
    out = site / "nvidia/cu13/lib"
    out.mkdir(parents=True, exist_ok=True)
    versioned, plain = needed(sorted((site / "torch/lib").glob("*.so*")))
    include = headers / "nvidia/cu13/include"
    plain |= set(re.findall(r"CUDARTAPI (cuda\w+)\(", (include / "cuda_runtime_api.h").read_text()))
    driver = set(re.findall(r"CUresult CUDAAPI (cu\w+)\(", (include / "cuda.h").read_text()))
    driver |= {f"{name}_v2" for name in driver if _SUFFIXED.match(name)}
    plain |= {"cublasLtCreate", "cublasLtDestroy", "cublasHgemm"}  # the last one for vLLM
    for soname in {*LIBRARIES, *versioned}:
        names = versioned.get(soname, set()) | (driver if soname == "libcuda.so.1" else set())
        own = LIBRARIES.get(soname)
        names |= {name for name in plain if own and soname != "libcuda.so.1" and re.match(own, name)}
        names |= {name for name in plain if soname == "libcuda.so.1" and re.match("cu[A-Z]", name)} - {
            name for name in plain if name.startswith("cuFile")
        }
        named = {"NVSHMEM": "libnvshmem_host.so.3"}.get(soname, soname)
        make(named, soname if soname in versioned else "", names, headers, out)
    (site / "fake_cuda.pth").write_text(
        f"{root}\n{root / 'backends'}\nimport site; site.addsitedir({str(root / '.venv' / SITE)!r})\n"
        "import tests.support.fake_cuda.start\n"
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
