"""Options files, data and models that are damaged, hostile or of a wrong kind."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.bad_inputs.cases import Case, write_options

Spoil = Callable[[Path], object]

# -- options files -------------------------------------------------------------------------------

_BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n".encode()
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

# Contents of run.yaml.
_WRITTEN: dict[str, bytes] = {
    "empty": b"",
    "only a comment": b"# nothing\n",
    "alias bomb": _BOMB,
    "anchor that holds itself": b"model_init_kwargs: &a {b: *a}\n",
    "NUL bytes": b"seed: 1\x00\n",
    "all NUL": b"\x00" * 1000,
    "not UTF-8": b"run_name: \xff\xfe\xfa\n",
    "UTF-16": "seed: 1\n".encode("utf-16"),
    "Latin-1": "run_name: é\n".encode("latin-1"),
    "a list": b"- seed\n- 1\n",
    "a word": b"seed\n",
    "two documents": b"seed: 1\n---\nseed: 2\n",
    "a key twice": b"seed: 1\nseed: 2\n",
    "a key twice inside": b"model_init_kwargs: {a: 1, a: 2}\n",
    "two names of one option": b"beta: 1\nkl_coef: 2\n",
    "tag that runs code": b"seed: !!python/object/apply:os.system [true]\n",
    "unfinished": b"seed: [1, 2\n",
    "a tab": b"model_init_kwargs:\n\t- 1\n",
    "deep lists": b"lora_target_modules: " + b"[" * 5000 + b"]" * 5000,
    "deep mappings": b"model_init_kwargs: " + b"{a: " * 3000 + b"1" + b"}" * 3000,
    "60 seconds": b"seed: 1:30\n",
    "octal of YAML 1.1": b"seed: 010\n",
    "binary of YAML 1.1": b"seed: 0b11\n",
    "a date": b"seed: 2024-01-01\n",
    "merge of nothing": b"<<: *nothing\nseed: 1\n",
    "merge key alone": b"seed: <<\n",
    "a key that is a list": b"[1, 2]: 3\n",
    "a huge number": b"seed: 1" + b"0" * 5000 + b"\n",
    "a huge float": b"beta: 1e999\n",
    "not a number": b"beta: .nan\n",
    "2 MB of options": b"run_name: '" + b"x" * 2_000_000 + b"'\n",
    "100,000 options": b"".join(f"o{n}: 1\n".encode() for n in range(100_000)),
}


def _yaml(content: bytes) -> Spoil:
    return lambda folder: (folder / "run.yaml").write_bytes(content)


def _yaml_case(name: str, spoil: Spoil) -> Case:
    return Case(f"yaml: {name}", "yaml", ("run.yaml",), spoil=spoil)


def _replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    """Replace the file `name` by something that is no regular file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def _link_to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


_SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "endless device": _link_to("/dev/zero"),
    "null device": _link_to("/dev/null"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "missing": lambda path: None,
    "100 GB": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 10**11),
}

YAMLS = (
    *(_yaml_case(name, _yaml(content)) for name, content in _WRITTEN.items()),
    *(_yaml_case(name, _replaced("run.yaml", make)) for name, make in _SPECIAL.items()),
)

# -- data ----------------------------------------------------------------------------------------

_ROW = b'{"prompt": "1 + 1 =", "answer": "2"}\n'
# The invalid byte is decoded to U+FFFD.
_MAY_RUN = ("half a surrogate",)
# (file, content): the file is the dataset.
_ROWS: dict[str, tuple[str, bytes]] = {
    "empty": ("d.jsonl", b""),
    "blank lines": ("d.jsonl", b"\n\n \n"),
    "key twice in a row": ("d.jsonl", _ROW + b'{"prompt": "a", "prompt": "b"}\n'),
    "key twice further in": ("d.jsonl", b'{"prompt": "a", "x": {"k": 1, "k": 2}}\n'),
    "no JSON": ("d.jsonl", _ROW + b"prompt: a\n"),
    "cut row": ("d.jsonl", _ROW + _ROW[:20]),
    "a list as row": ("d.jsonl", _ROW + b'["a"]\n'),
    "a number as row": ("d.jsonl", b"1\n"),
    "NaN": ("d.jsonl", b'{"prompt": NaN}\n'),
    "prompt is a number": ("d.jsonl", b'{"prompt": 5}\n'),
    "prompt is null": ("d.jsonl", _ROW + b'{"prompt": null}\n'),
    "prompt is empty": ("d.jsonl", b'{"prompt": ""}\n'),
    "prompt is a mapping": ("d.jsonl", b'{"prompt": {"a": 1}}\n'),
    "message without content": ("d.jsonl", b'{"prompt": [{"role": "user"}]}\n'),
    "no messages": ("d.jsonl", b'{"prompt": []}\n'),
    "unknown role": ("d.jsonl", b'{"prompt": [{"role": "u", "content": "a"}]}\n'),
    "no column prompt": ("d.jsonl", b'{"question": "a"}\n'),
    "mixed types": ("d.jsonl", b'{"prompt": "a"}\n{"prompt": 1}\n'),
    "not UTF-8": ("d.jsonl", b'{"prompt": "\xff\xfe"}\n'),
    "UTF-16": ("d.jsonl", '{"prompt": "a"}\n'.encode("utf-16")),
    "NUL bytes": ("d.jsonl", b"\x00" * 4096),
    "half a surrogate": ("d.jsonl", b'{"prompt": "\\ud800"}\n'),
    "deep": ("d.jsonl", b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "deep mappings": ("d.jsonl", b'{"prompt": "a", "x": ' + b'{"a":' * 9000 + b"1" + b"}" * 9001),
    "huge integer": ("d.jsonl", b'{"prompt": "a", "x": 1' + b"0" * 5000 + b"}\n"),
    "integer beyond 64 bits": ("d.jsonl", b'{"prompt": "a", "x": 99999999999999999999}\n'),
    "huge prompt": ("d.jsonl", b'{"prompt": "' + b"1 " * 5_000_000 + b'"}\n'),
    "list file cut": ("d.json", b'[{"prompt": "a"}, '),
    "list of words": ("d.json", b'["a", "b"]'),
    "deep list": ("d.json", b"[" * 100_000),
    "csv ragged": ("d.csv", b"prompt,answer\na,b\nc\nd,e,f\n"),
    "csv empty": ("d.csv", b""),
    "csv not UTF-8": ("d.csv", b"prompt\n\xff\xfe\n"),
    "csv header only": ("d.csv", b"prompt\n"),
    "csv column twice": ("d.csv", b"prompt,prompt\na,b\n"),
    "parquet empty": ("d.parquet", b""),
    "parquet of text": ("d.parquet", b"PAR1 nothing of the kind PAR1"),
    "unknown suffix": ("d.txt", _ROW),
    "archive": ("d.jsonl", b"PK\x03\x04" + bytes(range(256)) * 10),
}


def _parquet(damage: Callable[[bytearray], bytes | bytearray]) -> Spoil:
    def spoil(folder: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        path = folder / "d.parquet"
        prompts = [f"{n} + {n} =" for n in range(500)]
        parquet.write_table(pa.table({"prompt": prompts}), path, use_dictionary=False)
        path.write_bytes(damage(bytearray(path.read_bytes())))

    return spoil


def _flipped(at: float) -> Callable[[bytearray], bytearray]:
    def damage(content: bytearray) -> bytearray:
        start = int(at * len(content))
        for place in range(start, min(start + 16, len(content) - 1)):
            content[place] ^= 0xFF
        return content

    return damage


_PARQUETS: dict[str, Callable[[bytearray], bytes | bytearray]] = {
    "cut in half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "cut at the start": lambda content: content[10:],
    "flipped at the start": _flipped(0.0),
    "flipped in the header of a page": _flipped(0.002),
    "flipped in the footer": _flipped(0.95),
    "footer of another length": lambda content: content[:-8] + b"\xff\xff\xff\x7fPAR1",
}


def _data_case(name: str, file: str, spoil: Spoil) -> Case:
    arguments = ("--dataset", file)
    names, wrong = (file, "dataset", "prompt"), name not in _MAY_RUN
    return Case(f"data: {name}", "data", names, arguments, spoil, surely_wrong=wrong)


def _file(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def _in_folder(make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / "d").mkdir()
        make(folder / "d" / "train.jsonl")

    return spoil


DATA = (
    *(_data_case(name, file, _file(file, content)) for name, (file, content) in _ROWS.items()),
    *(_data_case(f"parquet {n}", "d.parquet", _parquet(d)) for n, d in _PARQUETS.items()),
    *(_data_case(n, "d.jsonl", _replaced("d.jsonl", make)) for n, make in _SPECIAL.items()),
    *(
        _data_case(f"{n} in a folder", "d", _in_folder(make))
        for n, make in _SPECIAL.items()
        if n != "folder"
    ),
    _data_case("save_to_disk cut", "d", lambda f: _save_to_disk(f / "d", b"{")),
    _data_case("save_to_disk of nothing", "d", lambda f: _save_to_disk(f / "d", b"{}")),
)


def _save_to_disk(folder: Path, state: bytes) -> None:
    folder.mkdir()
    (folder / "state.json").write_bytes(state)


# -- models --------------------------------------------------------------------------------------


def _changed(file: str, **values: Any) -> Spoil:
    """Change values in a JSON file in the model's folder."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def _weights(damage: Callable[[dict[str, Any]], object]) -> Spoil:
    """Change the model's tensors, which `damage` gets by name."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model" / "model.safetensors"
        tensors = load_file(path)
        damage(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def _bytes(file: str, damage: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model" / file
        path.write_bytes(damage(path.read_bytes()))

    return spoil


def _without_tokenizer(folder: Path) -> None:
    for path in (folder / "model").glob("*token*"):
        path.unlink()


def _larger_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids of the dataset's words are larger than the embedding."""
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {w: i if i < 4 else i + 400 for w, i in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))


def _adapter(folder: Path) -> None:
    """The folder of an adapter whose base model is the folder itself."""
    (folder / "model" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "model", "r": 8})
    )


_QUERY = "model.layers.1.self_attn.q_proj.weight"
_HEADER = struct.pack("<Q", 2**60)
_MODELS: dict[str, Spoil] = {
    "no config": lambda folder: (folder / "model/config.json").unlink(),
    "empty config": _bytes("config.json", lambda content: b""),
    "cut config": _bytes("config.json", lambda content: content[:50]),
    "config is a list": _bytes("config.json", lambda content: b"[]"),
    "config is empty": _bytes("config.json", lambda content: b"{}"),
    "config of NUL bytes": _bytes("config.json", lambda content: b"\x00" * 500),
    "unknown kind": _changed("config.json", model_type="nonsense"),
    "kind is a number": _changed("config.json", model_type=5),
    "hidden_size is text": _changed("config.json", hidden_size="wide"),
    "hidden_size 0": _changed("config.json", hidden_size=0),
    "hidden_size negative": _changed("config.json", hidden_size=-128),
    "hidden_size huge": _changed("config.json", hidden_size=2**40),
    "hidden_size of another model": _changed("config.json", hidden_size=64),
    "vocab_size huge": _changed("config.json", vocab_size=10**12),
    "vocab_size small": _changed("config.json", vocab_size=10),
    "heads 0": _changed("config.json", num_attention_heads=0),
    "layers huge": _changed("config.json", num_hidden_layers=10**6, layer_types=None),
    "layers one more": _changed("config.json", num_hidden_layers=5, layer_types=None),
    "layers one less": _changed("config.json", num_hidden_layers=3, layer_types=None),
    "activation unknown": _changed("config.json", hidden_act="nonsense"),
    "rope null": _changed("config.json", rope_parameters=5),
    "context of 2 tokens": _changed("config.json", max_position_embeddings=2),
    "eos is text": _changed("generation_config.json", eos_token_id="end"),
    "no weights": lambda folder: (folder / "model/model.safetensors").unlink(),
    "empty weights": _bytes("model.safetensors", lambda content: b""),
    "cut weights": _bytes("model.safetensors", lambda content: content[:-1000]),
    "cut header": _bytes("model.safetensors", lambda content: content[:100]),
    "header of 2^60 bytes": _bytes("model.safetensors", lambda content: _HEADER + content[8:]),
    "weights of NUL bytes": _bytes("model.safetensors", lambda content: bytes(len(content))),
    "a missing tensor": _weights(lambda tensors: tensors.pop(_QUERY)),
    "a tensor too many": _weights(lambda tensors: tensors.update(new=tensors[_QUERY].clone())),
    "a resized tensor": _weights(lambda tensors: tensors.update({_QUERY: tensors[_QUERY][:8]})),
    "a tensor of NaN": _weights(lambda tensors: tensors[_QUERY].fill_(float("nan"))),
    "no tokenizer": _without_tokenizer,
    "cut tokenizer": _bytes("tokenizer.json", lambda content: content[: len(content) // 2]),
    "empty tokenizer": _bytes("tokenizer.json", lambda content: b"{}"),
    "tokenizer larger than the embedding": _larger_tokenizer,
    "adapter of itself": _adapter,
    "adapter config cut": lambda f: (f / "model/adapter_config.json").write_bytes(b"{"),
    "fifo as config": _replaced("model/config.json", os.mkfifo),
    "fifo as weights": _replaced("model/model.safetensors", os.mkfifo),
    "folder as weights": _replaced("model/model.safetensors", Path.mkdir),
}
_MODEL_NAMES = ("model", "num_hidden_layers", "max_completion_length")
MODELS = (
    *(Case(f"model: {n}", "models", _MODEL_NAMES, spoil=s) for n, s in _MODELS.items()),
    Case(
        "model: options of another kind", "models", ("run.yaml",),
        spoil=lambda folder: write_options(folder / "run.yaml", {"model": {"name": "model"}}),
    ),
)  # fmt: skip
