"""What each interpreter that a counted test run starts does first: it notes starts of processes and imports of torch.

`tests/support/counted.py` puts this folder on the PYTHONPATH. Each note is a line of the file that COUNTED_TESTS names.
"""

import os
import sys

_NOTES = os.environ.get("COUNTED_TESTS")
_ENGINES = ("meshrl.engines.processes.template", "meshrl_inference.engine_side.worker", "meshrl_inference.process")


def note(what: str) -> None:
    """Append a line. Lines this short are written whole, by however many processes."""
    if _NOTES is not None:
        descriptor = os.open(_NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{what}\n".encode())
        os.close(descriptor)


def _hear(event: str, given: tuple[object, ...]) -> None:
    if event == "import" and given[0] == "torch":
        note("torch")
    elif event == "os.fork":
        note("process")
    elif event == "subprocess.Popen":
        note("process")
        if "gcs_server" in str(given[0]):
            note("engine")


if _NOTES is not None:
    sys.addaudithook(_hear)
    note("interpreter")
    if any(name in _ENGINES for name in sys.orig_argv):
        note("engine")
