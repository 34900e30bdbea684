"""safetensors: read as the library reads it, sharded or not; files that lie; heads (R57)."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from conftest import TinyModels
from octavo.errors import ModelError
from octavo.loading import open_model
from octavo.loading.safetensors import SafetensorsFile, open_shards
from octavo.loading.tensor import Tensor


def image(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def values(tensor: Tensor) -> np.ndarray:
    if tensor.type == "F32":
        return tensor.data.view("<f4").reshape(tensor.shape)
    if tensor.type == "F16":
        return tensor.data.view("<f2").astype(np.float32).reshape(tensor.shape)
    return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("family", ["llama", "llama-untied", "llama-bias", "mistral", "qwen2", "qwen3", "gemma3"])
def test_every_family_has_transformers_weights(family: str, kind: str, tiny_models: TinyModels) -> None:
    """Norms come as float32 multipliers (Gemma's plus one), matrices as they lie in the file."""
    checkpoint = open_model(tiny_models.folder(family, kind))
    gemma = family == "gemma3"
    named = {tiny.canonical(n, gemma): p for n, p in tiny_models.get(family, kind).model.named_parameters()}
    assert set(checkpoint.tensors) == set(named)
    for name, p in named.items():
        tensor, expected = checkpoint.tensors[name], p.data.numpy()
        assert tensor.type == (kind if p.ndim == 2 else "F32") and tensor.shape == expected.shape
        if p.ndim == 1 and gemma:
            expected = expected + np.float32(1)
        assert len(tensor.data) == tensor.nbytes
        assert np.array_equal(values(tensor), expected), name


def test_reads_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).half(),
        "c": torch.randn(2, 2, 2).bfloat16(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "whole": torch.arange(5),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(tensors)
    for name, expected in load_file(path).items():
        entry = file.tensors[name]
        assert entry.shape == tuple(expected.shape)
        if name == "whole":
            assert entry.type == "I64" and entry.nbytes == -1
        else:
            assert file.bytes_of(entry).tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes()


LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "short": (b"\x01\x02", "cut off or not a safetensors"),
    "header beyond": (image({}, length=1 << 40), "cut off or not a safetensors"),
    "not JSON": (image(b"{'a': 1}"), "no valid JSON"),
    "not UTF-8": (image(b'{"\xff": 1}'), "no valid JSON"),
    "deep JSON": (image(b"[" * 100_000), "no valid JSON"),
    "a list": (image(b"[1]"), "not an object"),
    "twice": (image(b'{"a": 1, "a": 2}'), "a is there twice"),
    "no dtype": (image({"t": {"shape": [], "data_offsets": [0, 4]}}), "tensor t without dtype"),
    "not a dict": (image({"t": 3}), "tensor t without dtype"),
    "dtype number": (image({"t": one(dtype=5)}, bytes(16)), "tensor t by values of the wrong kind"),
    "shape text": (image({"t": one(shape="22")}, bytes(16)), "tensor t by values of the wrong kind"),
    "negative": (image({"t": one(shape=[-2, -2])}, bytes(16)), "tensor t by values of the wrong kind"),
    "true": (image({"t": one(shape=[True, 4])}, bytes(16)), "tensor t by values of the wrong kind"),
    "huge": (image({"t": one(shape=[1 << 61, 1 << 61])}, bytes(16)), "tensor t 16 bytes, but"),
    "three offsets": (image({"t": one(offsets=[0, 8, 16])}, bytes(16)), "tensor t by values of the wrong kind"),
    "backwards": (image({"t": one(offsets=[16, 0])}, bytes(16)), "tensor t ends beyond"),
    "beyond": (image({"t": one()}, bytes(15)), "tensor t ends beyond"),
    "wrong size": (image({"t": one(shape=[3, 2])}, bytes(32)), "tensor t 16 bytes, but F32"),
    "overlap": (image({"t": one(), "u": one(offsets=[8, 24])}, bytes(32)), "tensors t and u in the same bytes"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_that_names_file_and_thing(name: str, tmp_path: Path) -> None:
    raw, why = LIES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=why) as error:
        SafetensorsFile(path)
    assert "model.safetensors" in str(error.value)


def test_truncated_and_flipped_files_never_crash(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    save_file({"a": torch.randn(8, 8), "b": torch.randn(16).half()}, good)
    whole = good.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(3)
    for trial in range(2000):
        path = tmp_path / f"bad{trial % 2}"
        path.unlink(missing_ok=True)
        raw = bytearray(whole)
        if trial % 4 == 0:
            del raw[rng.randrange(len(raw)) :]
        else:
            raw[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(raw)
        try:
            file = SafetensorsFile(path)
            for entry in file.tensors.values():
                assert entry.nbytes < 0 or len(file.bytes_of(entry)) == entry.nbytes
        except ModelError:
            pass


def sharded(folder: Path) -> Path:
    tiny.make("llama-untied").model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = tiny.make("llama-untied").save(tmp_path / "whole")
    a, b = open_model(whole), open_model(sharded(tmp_path / "shards"))
    assert len(b.files) > len(a.files) and a.spec == b.spec and a.nbytes == b.nbytes
    for name in a.tensors:
        assert np.array_equal(a.tensors[name].data, b.tensors[name].data)


def test_shards_that_lie(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first = sorted(set(good["weight_map"].values()))[0]
    name = next(iter(good["weight_map"]))

    def write(**changes: Any) -> None:
        index.write_text(json.dumps({**good, **changes}))

    write(weight_map={})
    with pytest.raises(ModelError, match="has no weight_map"):
        open_model(folder)
    write(weight_map={**good["weight_map"], name: "../secret.safetensors"})
    with pytest.raises(ModelError, match="is not a file beside it"):
        open_model(folder)
    write(weight_map={**good["weight_map"], "ghost": first})
    with pytest.raises(ModelError, match="lacks tensor ghost"):
        open_model(folder)
    write()
    (folder / first).rename(folder / "away")
    with pytest.raises(ModelError, match="doesn't exist, but model.safetensors.index.json names it"):
        open_model(folder)
    (folder / "away").rename(folder / first)
    index.unlink()
    with pytest.raises(ModelError, match=r"files but no model\.safetensors\.index\.json"):
        open_model(folder)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no .safetensors file"):
        open_shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="pytorch_model.bin is a pickle"):
        open_shards(tmp_path)


# ---- heads and shapes ------------------------------------------------------------------------------------------------


def folder_with(path: Path, tied: bool, head: str | None, **extra: torch.Tensor | None) -> Path:
    """A tiny Llama; ``head``: None (absent), "same" as the embedding, or "other"; ``extra`` (__: a dot) replaces."""
    tiny.make("llama", tie_word_embeddings=tied).save(path)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    embed = tensors["model.embed_tokens.weight"]
    if head:
        tensors["lm_head.weight"] = embed.clone() if head == "same" else -embed
    for name, value in extra.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors")
    return path


def head_of(folder: Path) -> np.ndarray:
    checkpoint = open_model(folder)
    return values(checkpoint.tensors["embed" if checkpoint.spec.tied else "head"])


def test_heads(tmp_path: Path) -> None:
    """R57 (sglang PR 1508; vLLM PR 6758, 53019): the head is what transformers would use."""
    for i, (tied, head) in enumerate(
        [(True, None), (True, "same"), (True, "other"), (False, "same"), (False, "other")]
    ):
        folder = folder_with(tmp_path / str(i), tied, head)
        model = tiny.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert np.array_equal(head_of(folder), model.lm_head.weight.detach().numpy()), (tied, head)


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    """R57: a loud error that names the tensor."""
    with pytest.raises(ModelError, match=r"lacks tensor lm_head\.weight \(needed with shape \(512, 64\)\)"):
        open_model(folder_with(tmp_path / "m", tied=False, head=None))


def test_a_tied_model_saved_under_the_heads_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", True, "same", model__embed_tokens__weight=None)
    checkpoint = open_model(folder)
    expected = tiny.make("llama").model.get_input_embeddings().weight.detach().numpy()
    assert checkpoint.spec.tied and np.array_equal(values(checkpoint.tensors["embed"]), expected)


def test_bad_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks tensor model\.norm\.weight"):
        open_model(folder_with(tmp_path / "a", True, None, model__norm__weight=None))
    name = "model__layers__1__mlp__up_proj__weight"
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight has shape \(9, 64\), but \(96, 64\)"):
        open_model(folder_with(tmp_path / "b", True, None, **{name: torch.zeros(9, 64)}))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is of type I8, which Octavo doesn't read"):
        open_model(folder_with(tmp_path / "c", True, None, **{name: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape \(500, 64\), but \(512, 64\)"):
        open_model(folder_with(tmp_path / "d", True, None, model__embed_tokens__weight=torch.zeros(500, 64)))


def test_multimodal_gemma_loads_its_language_part(tmp_path: Path) -> None:
    """Both names under which transformers has saved it; vision tensors are left out."""
    text = tiny.make("gemma3")
    folder = text.save(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    expected = open_model(tiny.make("gemma3").save(tmp_path / "plain"))
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {prefix + k.removeprefix("model."): v for k, v in tensors.items()}
        (folder / "model.safetensors").unlink()
        save_file({**renamed, "vision_tower.x": torch.zeros(3)}, folder / "model.safetensors")
        found = open_model(folder)
        assert found.spec == expected.spec
        for name in expected.tensors:
            assert np.array_equal(found.tensors[name].data, expected.tensors[name].data)
