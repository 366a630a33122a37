"""Files that people name: a pipe without a writer, a socket, a device or a folder is refused with its name, everywhere."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from curation.import_export.export_proofs import verify_folder
from peer.export.export_replay import audit_export
from peer.export.row_proof_file import verify_row_proof
from peer.settings.config import load_settings
from protocol.errors import UserError
from rlhf.api.tuning_plan_builder import pack_word_file
from storage.regular_files import open_regular, read_regular, require_writable_kind
from training.data import text_files, token_shards
from training.formats import checkpoint, huggingface_model

pytestmark = pytest.mark.real("sockets")

SECONDS_MAX = 30  # a reader that waits for a writer ends here, with a failure


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    def end(*_: object) -> None:
        raise AssertionError("a pipe without a writer was waited for")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS_MAX)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_regular_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1_000_000)
    assert read_regular(tmp_path / "a") == b"x" * 1_000_000
    with open_regular(str(tmp_path / "a")) as stream:
        assert os.get_blocking(stream.fileno())


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket"), ("", "a folder")):
            with pytest.raises(UserError, match=f"{path} is {kind}: .*(name|give)"):
                open_regular(tmp_path / path)
    with pytest.raises(UserError, match="/dev/zero is a device"):
        open_regular("/dev/zero")
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_pipe_whose_writer_stays_silent_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    with pytest.raises(UserError, match="is a pipe"):
        read_regular(tmp_path / "pipe")
    os.close(writer)


def test_writes_go_to_files_and_character_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "missing"):
        require_writable_kind(path)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(UserError, match=r"is a (pipe|folder)"):
            require_writable_kind(path)


def _model(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pipe.safetensors"}}))
    os.mkfifo(folder / "pipe.safetensors")


def _shards(folder: Path) -> None:
    os.mkfifo(folder / "0.bin")


def _tokenizer(folder: Path) -> None:
    (folder / "0.bin").write_bytes(b"\0\0")
    os.mkfifo(folder / "tokenizer.json")


def _export(folder: Path) -> None:
    (folder / "genesis.msgpack").write_bytes(b"no genesis")
    os.mkfifo(folder / "manifest.json")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "text": (_pipe, lambda folder: next(text_files.read_text(folder / "pipe"))),
    "model folder": (_model, checkpoint.read_tensor_index),
    "model file": (_pipe, lambda folder: checkpoint.read_checkpoint(folder / "pipe")),
    "sums of a model": (_pipe, huggingface_model.sha256_sums),
    "shards": (_shards, token_shards.make_manifest),
    "tokenizer": (_tokenizer, token_shards.make_manifest),
    "words": (_pipe, lambda folder: pack_word_file(str(folder / "pipe"))),
    "settings": (_pipe, lambda folder: load_settings({}, {}, folder / "pipe")),
    "proof": (_pipe, lambda folder: verify_row_proof(folder / "pipe", "", None)),
    "labels": (lambda folder: os.mkfifo(folder / "project.proof"), lambda folder: verify_folder(folder, "")),
    "export": (_export, audit_export),
}


@pytest.mark.parametrize("name", READERS)
def test_pipe_is_refused_by_each_reader(name: str, tmp_path: Path) -> None:
    make, read = READERS[name]
    make(tmp_path)
    with pytest.raises(UserError, match="is a pipe: save its content in a file and name that"):
        read(tmp_path)


def test_pipe_in_a_folder_of_texts_is_left_out_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.txt: not a regular file"):
        next(text_files.read_text(tmp_path))
