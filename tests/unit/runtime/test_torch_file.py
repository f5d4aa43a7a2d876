"""The file writer beyond what 32 bits can count; ordinary files are tested wherever a checkpoint is."""

import os
import zipfile

import torch

from deepspeed.runtime.checkpoint.torch_file import TensorSource, plan_torch_file

BEYOND_NUMEL = 2**32 + 5


def test_tensors_and_places_beyond_4_gib_are_read_by_torch_and_by_zipfile(tmp_path):
    """A tensor larger than 4 GiB, and one behind it; zeros are left out, so that the file needs no disk."""
    path, behind = tmp_path / "large.pt", torch.arange(7)
    large = TensorSource(torch.tensor([1, 2, 3], dtype=torch.uint8), padded_numel=BEYOND_NUMEL)
    plan = plan_torch_file({"large": large, "behind": behind})
    record = plan.tensors[0]
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    assert list(plan.write(fd, record, end=3)) == [3]
    record.written = record.nbytes
    plan.finish(fd)
    os.close(fd)

    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        assert entries["archive/data/0"].file_size == BEYOND_NUMEL
        assert entries["archive/data/1"].header_offset > BEYOND_NUMEL
        assert archive.read("archive/data/1") == behind.numpy().tobytes()
        assert archive.read("archive/version") == b"3\n"
        with archive.open("archive/data/0") as opened:
            assert opened.read(4) == bytes([1, 2, 3, 0])
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["large"].shape == (BEYOND_NUMEL,) and loaded["large"][:4].tolist() == [1, 2, 3, 0]
    assert loaded["large"][-1] == 0 and torch.equal(loaded["behind"], behind)
