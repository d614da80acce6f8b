"""Write `signatures/` anew, from the sources that are here:

    python -m tests.contracts.renew [--download]

With --download pip brings those that no environment has, without what they depend on, into `.contracts/`. They are
unpacked, and never installed or imported.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.contracts.contracts import SIGNATURES, real
from tests.contracts.sources import CACHE, DISTRIBUTIONS, Distribution


def main() -> None:
    """Write what can be written."""
    for each in DISTRIBUTIONS:
        if each.root() is None and "--download" in sys.argv:
            download(each)
        if root := each.root():
            lines = [f"{target}: {signature}\n" for target, signature in real(each, root).items()]
            (SIGNATURES / f"{each.title}.txt").write_text("".join(lines))
        else:
            sys.stderr.write(f"{each.title}: its sources are not here; --download brings them\n")


def download(distribution: Distribution) -> None:
    """Bring a release's Python sources into the cache."""
    asked = [f"{distribution.name}=={distribution.version}", "--no-deps"]
    if distribution.is_built:  # pip asks a source distribution for its name by running its setup.py
        asked += ["--no-binary", ":all:", "--no-build-isolation"]
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *asked]
        subprocess.run(command, check=True, env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"})
        (archive,) = Path(folder).iterdir()
        apart = Path(folder, "apart")
        if archive.suffix == ".whl":
            shutil.unpack_archive(archive, top := apart, "zip")
        else:
            shutil.unpack_archive(archive, apart, "gztar", filter="data")
            (top,) = apart.iterdir()
        for file in (top / distribution.folder).rglob("*.py"):
            kept = CACHE / distribution.title / file.relative_to(top)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept)


if __name__ == "__main__":
    main()
