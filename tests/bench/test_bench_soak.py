"""What bench/soak.py says if it cannot do what is asked; what it measures is not run here."""

import os
import sys

import pytest

from bench import soak


def test_without_root_a_soak_with_faults_names_the_one_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--minutes", "20", "--seed", "0"])
    soak.main()
    said = capsys.readouterr().out
    assert "not measured: hosts are namespaces, which only root may make" in said
    assert "--hosts 1 measures the memory of a run without faults" in said
