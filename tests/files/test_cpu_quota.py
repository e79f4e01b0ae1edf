"""The CPU quota of a container, as both versions of cgroups show it, and the threads that commands use by it."""

from pathlib import Path

import pytest
import torch

from redrafter.app import loading
from redrafter.files.cpu_quota import cpu_quota

V2, V1 = "0::/pods/mine\n", "9:memory:/pods/mine\n4:cpu,cpuacct:/pods/mine\n1:name=systemd:/\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        (V2, {"pods/mine/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"pods/mine/cpu.max": "max 100000\n"}, None),
        (V2, {"pods/mine/cpu.max": "max 100000\n", "pods/cpu.max": "50000 100000\n"}, 0.5),
        (V2, {"cpu.max": "200000 100000\n"}, 2.0),  # in a container, whose group is mounted as the root
        (V2, {}, None),
        (
            V1,
            {f"cpu,cpuacct/pods/mine/cpu.cfs_{name}_us": each for name, each in (("quota", "5"), ("period", "10"))},
            0.5,
        ),
        (V1, {f"cpu/cpu.cfs_{name}_us": each for name, each in (("quota", "30"), ("period", "10"))}, 3.0),
        (V1, {f"cpu/cpu.cfs_{name}_us": each for name, each in (("quota", "-1"), ("period", "10"))}, None),
        ("", {"cpu.max": "1 2 3\n"}, None),
    ],
)
def test_the_lowest_limit_of_a_group_and_of_those_around_it_counts(tmp_path: Path, own, files, quota):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path, tmp_path / "own") == quota


@pytest.mark.parametrize(
    ("quota", "chosen", "threads"), [(0.5, None, 1), (2.5, None, 2), (None, None, 4), (16.0, None, 4), (1.0, "4", 4)]
)
def test_a_command_uses_at_most_the_threads_of_the_quota_and_says_so(monkeypatch, capsys, quota, chosen, threads):
    used = [4]
    monkeypatch.setattr(loading, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    loading.limit_threads("cpu")
    assert used[-1] == threads
    said = capsys.readouterr().err
    assert ("OMP_NUM_THREADS=N" in said) == (threads < 4)
    assert said.count("\n") == (threads < 4)
