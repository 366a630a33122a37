"""Packed files: two bits for each element of a ternary matrix."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors

from peer.export.model_export import write_model_files
from peer.export.model_provenance import ExportableModel
from protocol.errors import UserError
from training.formats import checkpoint, huggingface_model, packed_model
from training.formats.huggingface_model import llama_tensor_names, open_huggingface_model
from training.job_spec import JobSpec
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.ternary import ternary_weights
from training.transformer import ModelSpec, model_tensors

# The key matrix has 7 · 14 elements, which are no multiple of four.
MODEL = ModelSpec(context=16, width=14, layers=2, heads=1, kv_heads=1, hidden=9, tied=False, linear="ternary")
SPEC = JobSpec(name="small", data=bytes(32), model=MODEL)
DENSE = replace(SPEC, model=replace(MODEL, linear="dense"))
FIRST = "model.layers.0.mlp.down_proj.weight"


def found_of(spec: JobSpec = SPEC) -> ExportableModel:
    return ExportableModel("lab", "c" * 64, bytes(32), spec, 3, bytes(32), initial_parameters(spec), None, "a test")


def written(folder: Path, format: str = "packed") -> Path:
    write_model_files(found_of(), folder, format)
    return folder


def weights_of(spec: JobSpec, parameters: Float32Array) -> dict[str, Float32Array]:
    kinds = model_tensors(spec.model)
    views = layout_of(spec).tensor_views(parameters)
    return {name: ternary_weights(view) if kinds[name].parameter.is_ternary else view for name, view in views.items()}


def read(folder: Path) -> Float32Array:
    own, stream = open_huggingface_model(folder), io.BytesIO()
    assert own.model == MODEL
    own.write_parameters(SPEC, stream)
    return np.frombuffer(stream.getvalue(), "<f4")


def test_levels_are_packed_four_in_a_byte_and_unpacked_again() -> None:
    levels = np.array([[1, 0, -1, 1, -1]], dtype=np.int8)
    assert packed_model.pack_levels(levels).tolist() == [0b01_10_00_01, 0b10]
    draw = np.random.default_rng(0)
    for size in range(1, 40):
        levels = draw.integers(-1, 2, size).astype(np.int8)
        assert np.array_equal(packed_model.unpack_levels(packed_model.pack_levels(levels), size), levels)


@pytest.mark.parametrize("format", ["transformers", "packed"])
def test_files_give_a_model_that_computes_with_the_same_bits(tmp_path: Path, format: str) -> None:
    given = read(written(tmp_path / "out", format))
    theirs, ours = weights_of(SPEC, given), weights_of(SPEC, initial_parameters(SPEC))
    assert all(theirs[name].tobytes() == ours[name].tobytes() for name in ours)
    assert not np.array_equal(given, initial_parameters(SPEC)), "the latent weights are others"


def test_the_dense_file_has_the_weights_that_the_model_computes_with(tmp_path: Path) -> None:
    written(tmp_path / "out")
    names, ours = llama_tensor_names(MODEL), weights_of(SPEC, initial_parameters(SPEC))
    dense = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert all(dense[names[name]].tobytes() == values.tobytes() for name, values in ours.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["folkmoot_linear"] == "ternary"
    assert "| matrices of the layers | ternary" in (tmp_path / "out" / "README.md").read_text()
    assert "folkmoot_linear" not in huggingface_model.llama_config(DENSE.model, None)


def test_codes_take_a_sixteenth_and_the_packed_file_stands_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    whole = read(folder)
    for path in (folder / "model.safetensors", folder / "SHA256SUMS"):
        path.unlink()
    assert np.array_equal(read(folder), whole)
    found = safetensors.load_file(folder / packed_model.PACKED)
    for name, tensor in model_tensors(MODEL).items():
        codes = found[llama_tensor_names(MODEL)[name]]
        if tensor.parameter.is_ternary:
            size = int(np.prod(tensor.parameter.shape))
            assert codes.dtype == np.uint8 and codes.nbytes == -(-size // 4)
            scale = found[llama_tensor_names(MODEL)[name] + "_scale"]
            assert scale == weights_of(SPEC, initial_parameters(SPEC))[name].max()
        else:
            assert codes.dtype == np.float32


def test_every_changed_byte_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    (folder / "SHA256SUMS").unlink()  # The file's own digest must be enough.
    path, names = folder / packed_model.PACKED, llama_tensor_names(MODEL)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in (*range(0, header, 7), *range(header, len(data), 97), len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(UserError, match=r"packed\.safetensors is damaged: its bytes do not have the SHA-256"):
            packed_model.read_packed(path, MODEL, names)
    for cut in (b"", data[:5], data[:40], data[:-1], data + b"\0"):
        path.write_bytes(cut)
        with pytest.raises(UserError, match="is damaged"):
            open_huggingface_model(folder)
    path.write_bytes(checkpoint.LFS_POINTER + data)
    with pytest.raises(UserError, match=r"packed\.safetensors is a Git LFS pointer"):
        open_huggingface_model(folder)
    path.write_bytes(data)
    open_huggingface_model(folder)


def forged(path: Path, change: Callable[[bytearray, dict[str, int]], None]) -> None:
    """Change a packed file, and give it the digest that the changed bytes have."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    listed = json.loads(data[8 : 8 + length])
    change(data, {name: 8 + length + of["data_offsets"][0] for name, of in listed.items() if "data_offsets" in of})
    digest = slice(packed_model.DIGEST_AT, packed_model.DIGEST_AT + len(packed_model.NO_DIGEST))
    data[digest] = packed_model.NO_DIGEST.encode()
    data[digest] = hashlib.sha256(data).hexdigest().encode()
    path.write_bytes(data)
    (path.parent / "SHA256SUMS").unlink()


@pytest.mark.parametrize("change", [lambda data, _: data.extend(b"more"), lambda data, _: data.__delitem__(slice(-40, None))])
def test_a_file_of_another_size_than_its_header_describes_is_refused(
    tmp_path: Path, change: Callable[[bytearray, dict[str, int]], None]
) -> None:
    forged(written(tmp_path / "out") / packed_model.PACKED, change)
    with pytest.raises(UserError, match=r"packed\.safetensors is damaged: it has \d+ bytes, but its header describes \d+"):
        open_huggingface_model(tmp_path / "out")


def test_a_fourth_code_is_refused_by_its_tensor_and_element(tmp_path: Path) -> None:
    def change(data: bytearray, places: dict[str, int]) -> None:
        data[places[FIRST] + 2] |= 0b11_00

    forged(written(tmp_path / "out") / packed_model.PACKED, change)
    with pytest.raises(UserError, match=rf"tensor '{FIRST}': element 9 has the code 11, which stands for no level"):
        open_huggingface_model(tmp_path / "out")


def test_codes_behind_the_last_element_are_refused(tmp_path: Path) -> None:
    def change(data: bytearray, places: dict[str, int]) -> None:
        data[places[FIRST] + 14 * 9 // 4] |= 0b01_00_00_00

    forged(written(tmp_path / "out") / packed_model.PACKED, change)
    with pytest.raises(UserError, match="codes other than 0 follow its 126 elements"):
        open_huggingface_model(tmp_path / "out")


def test_a_scale_without_a_matrix_is_refused(tmp_path: Path) -> None:
    def change(data: bytearray, places: dict[str, int]) -> None:
        data[places[f"{FIRST}_scale"] : places[f"{FIRST}_scale"] + 4] = np.float32(-1).tobytes()

    forged(written(tmp_path / "out") / packed_model.PACKED, change)
    with pytest.raises(UserError, match=rf"tensor '{FIRST}': no matrix with these levels has the scale -1"):
        read(tmp_path / "out")


def test_a_matrix_of_zeros_has_a_finite_scale(tmp_path: Path) -> None:
    """Other programs multiply its codes by the scale."""

    def change(data: bytearray, places: dict[str, int]) -> None:
        data[places[FIRST] : places[f"{FIRST}_scale"]] = bytes(places[f"{FIRST}_scale"] - places[FIRST])
        data[places[f"{FIRST}_scale"] : places[f"{FIRST}_scale"] + 4] = np.float32(np.nan).tobytes()

    forged(written(tmp_path / "out") / packed_model.PACKED, change)
    with pytest.raises(UserError, match=rf"tensor '{FIRST}': no matrix with these levels has the scale nan"):
        read(tmp_path / "out")


def test_the_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    (folder / "SHA256SUMS").unlink()
    config = json.loads((folder / "config.json").read_text())
    for changed in ({"num_hidden_layers": 3}, {"folkmoot_linear": "dense"}, {"tie_word_embeddings": True}):
        (folder / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(UserError, match=r"its tensors are not those of the model that config\.json describes"):
            open_huggingface_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"folkmoot_linear": "binary"}))
    with pytest.raises(UserError, match=r"config\.json: unknown layer model\.linear 'binary': choose one of dense, ternary"):
        open_huggingface_model(folder)


def test_a_dense_file_with_weights_of_several_sizes_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", "transformers")
    (folder / "SHA256SUMS").unlink()
    tensors = safetensors.load_file(folder / "model.safetensors")
    tensors[FIRST] = tensors[FIRST] + np.float32(0.01)
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"tensor '{FIRST}' has weights of more than one size"):
        read(folder)


def test_a_dense_model_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has linear 'dense', and only ternary matrices are packed: use --format transformers"):
        write_model_files(found_of(DENSE), tmp_path / "out", "packed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["transformers", "packed", "gguf", "gguf-f32"])
@pytest.mark.parametrize("window", [None, 8])
def test_experts_are_refused_in_all_formats_with_what_their_model_is_good_for(
    tmp_path: Path, format: str, window: int | None
) -> None:
    model = replace(DENSE.model, feed_forward="experts", experts=4).with_window(window)
    with pytest.raises(UserError) as refused:
        write_model_files(found_of(replace(DENSE, model=model)), tmp_path / "out", format)
    assert str(refused.value) == (
        "job 'small' has feed_forward 'experts', which no --format has: "
        "ask the model with `peer sample`, or train it further with `peer train --from`"
    )
    assert not list(tmp_path.iterdir())


def test_gguf_has_the_same_weights(tmp_path: Path) -> None:
    written(tmp_path / "out", "gguf-f32")
    data = (tmp_path / "out" / "model.gguf").read_bytes()
    name = "layers.1.down.weight"
    assert weights_of(SPEC, initial_parameters(SPEC))[name].tobytes() in data
    assert layout_of(SPEC).tensor_views(initial_parameters(SPEC))[name].tobytes() not in data
