"""The functions of `decode.c` on tensors: products by matrices packed in panels, and decoding."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.kernels.ffi import call

_INT = ctypes.c_int64
_POINTER = ctypes.c_void_p
_STORE, _ADD, _GATE = range(3)
# The minimum number of floats in a thread's buffer of attention scores.
_SCORES = 1 << 15
# The initial number of slots of a row in the cache. The number doubles when the cache is full.
_FIRST_SLOTS = 64


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _names(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


_Matrix = _struct(
    "Matrix", **_names(_POINTER, "panels", "bias"), **_names(_INT, "depth", "columns", "is_half")
)
_Layer = _struct(
    "Layer", **_names(_Matrix, "qkv", "out", "gate_up", "down"), **_names(_POINTER, "qk_norm")
)
_SIZES = ("layers", "hidden", "heads", "key_heads", "size", "inner", "vocabulary")
_Model = _struct(
    "Model",
    **_names(_INT, *_SIZES),
    **_names(ctypes.c_float, "hidden_floor", "size_floor"),
    **_names(_POINTER, "layer", "embedding", "norm", "rotations"),
    head=_Matrix,
)
_Cache = _struct("Cache", **_names(_POINTER, "keys", "values"), slots=_INT)
_State = _struct(
    "State",
    **_names(_Cache, "prompts", "own"),
    **_names(_POINTER, "prompt_of", "prompt_lengths", "positions", "places"),
    **_names(_INT, "length", "active"),
    rows=_POINTER,
)
_ARRAYS = ("hidden", "states", "attended", "gated", "logits")
_Room = _struct(
    "Room",
    **_names(_POINTER, *_ARRAYS, "scales"),
    **_names(_INT, *(f"{name}_stride" for name in _ARRAYS)),
    scores=_POINTER,
    score_room=_INT,
)
_Drawing = _struct(
    "Drawing",
    temperature=ctypes.c_double,
    greedy=_INT,
    stops=_POINTER,
    num_stops=_INT,
    **_names(_POINTER, "limits", "next", "tokens", "logprobs"),
    width=_INT,
    noise=_POINTER,
    **_names(_INT, "noise_width", "noise_from"),
)


@cache
def columns() -> int:
    """The number of columns of a panel: two SIMD vectors of float32."""
    return int(call("rloo_columns"))


def round_up(size: int) -> int:
    """Round a size up to full panels."""
    return -(-size // columns()) * columns()


def filled_up(token_bytes: int, size: int) -> int:
    """Bytes that a token's keys and values occupy in `DecodingRows`, including the padding of the
    values' panels. Without padding, the keys and values have `token_bytes`. A head has `size`
    elements."""
    values = token_bytes // 2
    return token_bytes - values + values * round_up(size) // size


def filling() -> int:
    """The largest number of padding tokens in the panels of a row's keys and its prompt's keys."""
    return 2 * (columns() - 1)


def to_panels(matrix: Tensor) -> Tensor:
    """Pack (.., N, K) into panels (.., ceil(N / columns), K, columns), padded with zeros."""
    step, (*others, count, depth) = columns(), matrix.shape
    whole, rest = divmod(count, step)
    panels = matrix.new_empty(*others, whole + bool(rest), depth, step)
    parts = matrix[..., : whole * step, :].unflatten(-2, (whole, step))
    panels[..., :whole, :, :] = parts.mT
    if rest:
        panels[..., whole, :, rest:].zero_()
        panels[..., whole, :, :rest] = matrix[..., whole * step :, :].mT
    return panels


def _gates_to_panels(matrix: Tensor) -> Tensor:
    """Pack a gated matrix (gates, then the rows that they multiply). A panel is half gates, half
    rows."""
    step = columns()
    halves = matrix.view(2, len(matrix) // step, step // 2, -1)
    return halves.permute(1, 3, 0, 2).reshape(len(matrix) // step, -1, step)


class PackedMatrix:
    """A weight matrix (N, K), float32 or bfloat16, and an optional bias (N,), for products with
    float32 rows (T, K). In a `gated` matrix the first N / 2 rows are the gates, and N must be a
    multiple of `columns()`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        self.size: int
        self.depth: int
        self.size, self.depth = weight.shape
        pack = _gates_to_panels if gated else to_panels
        self._weight = pack(weight)
        self._bias = None if bias is None else pack(bias.float()[:, None]).flatten()
        self.struct: ctypes.Structure = _Matrix(
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.depth,
            self.size,
            int(weight.dtype == torch.bfloat16),
        )

    @property
    def hidden_bytes(self) -> int:
        """Bytes that torch's allocation statistics do not count: 0."""
        return 0

    def times(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias: (T, N)."""
        return self._product(rows, rows.new_empty(len(rows), round_up(self.size)), _STORE)

    def added(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden + rows @ weight.T + bias: (T, N)."""
        return self.times(rows).add_(hidden)

    def gated(self, rows: Tensor) -> Tensor:
        """silu(gate) * up: (T, N / 2). In the unpacked order, gate is the first half of the columns
        of rows @ weight.T + bias, and up is the second half."""
        return self._product(rows, rows.new_empty(len(rows), self.size // 2), _GATE)

    def _product(self, rows: Tensor, result: Tensor, how: int) -> Tensor:
        assert rows.dtype == torch.float32 and rows.shape[1] == self.depth
        rows = rows.contiguous()
        given = (rows, self.depth, len(rows), ctypes.byref(self.struct), how)
        call("rloo_product", *given, result, result.shape[1])
        return result if how == _GATE else result[:, : self.size]


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder. `size` is the width of a head, `inner` the width of the gated unit.
    `hidden_floor` is `hidden`, and `size_floor` is `size`, each times the norm's epsilon."""

    hidden: int
    heads: int
    key_heads: int
    size: int
    inner: int
    vocabulary: int
    hidden_floor: float
    size_floor: float


class CDecoder:
    """A decoder in C. Each of `layers` has the matrices queries-keys-values, out, gate-up and down,
    and an optional norm of queries and keys. `others` are embedding, final norm and head."""

    def __init__(
        self,
        sizes: DecoderSizes,
        layers: Sequence[
            tuple[PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix, Tensor | None]
        ],
        others: tuple[Tensor, Tensor, PackedMatrix],
    ) -> None:
        embedding, norm, head = others
        self.sizes = sizes
        self.num_layers: int = len(layers)
        norms = [None if layer[4] is None else layer[4].contiguous() for layer in layers]
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(*(m.struct for m in layer[:4]), None if qk is None else qk.data_ptr())
                for layer, qk in zip(layers, norms, strict=True)
            )
        )
        self._kept = layers, others, norms, norm, embedding
        self.struct: ctypes.Structure = _Model(
            layers=len(layers),
            **{name: getattr(sizes, name) for name in _SIZES if name != "layers"},
            hidden_floor=sizes.hidden_floor,
            size_floor=sizes.size_floor,
            layer=ctypes.cast(self._layers, _POINTER),
            embedding=embedding.data_ptr(),
            norm=norm.data_ptr(),
            head=head.struct,
        )

    def rotate_by(self, rotations: Tensor) -> None:
        """Use these rotary embeddings, complex64 (positions, size / 2)."""
        cosines, sines = rotations.real, rotations.imag
        of_pairs = torch.stack([cosines, cosines, -sines, sines], dim=-1).unflatten(-1, (2, 2))
        self._rotations = of_pairs.movedim(-2, 1).contiguous()
        self.struct.rotations = self._rotations.data_ptr()


class DecodingRows:
    """Rows that are decoded together; each step samples one token per row. `prompts` yields for
    each layer the keys and the values of the P prompts, both (P, H_kv, longest, D). `lengths` (P,)
    are the numbers of tokens of the prompts. `prompt_of` (R,) is the index of each row's prompt."""

    def __init__(
        self,
        model: CDecoder,
        prompts: Iterable[tuple[Tensor, Tensor]],
        lengths: Tensor,
        prompt_of: Tensor,
        drawing: TokenSampling,
    ) -> None:
        self._model, self._drawing = model, drawing
        rows = len(prompt_of)
        panels = [(to_panels(k), to_panels(_whole_slots(v).mT)) for k, v in prompts]
        self._prompts = _Tokens([k for k, _ in panels], [v for _, v in panels])
        self._own = self._make_cache(rows, round_up(min(_FIRST_SLOTS, drawing.width)))
        self._lengths, self._prompt_of = lengths, prompt_of
        self._positions = lengths[prompt_of]
        self._rows, self._places = torch.arange(rows), torch.arange(rows)
        self._room, self._arrays = self._make_room(rows)
        self._state = _State(
            prompts=self._prompts.struct,
            own=self._own.struct,
            prompt_of=prompt_of.data_ptr(),
            prompt_lengths=lengths.data_ptr(),
            positions=self._positions.data_ptr(),
            places=self._places.data_ptr(),
            length=0,
            active=rows,
            rows=self._rows.data_ptr(),
        )

    @property
    def rows(self) -> Tensor:
        """The indices of the active rows, in order."""
        return self._rows[: self._state.active]

    def keep(self, alive: Tensor) -> None:
        """Keep active only those of `rows` for which `alive` (bool) is true."""
        left = self.rows[alive]
        self._rows[: len(left)] = left
        self._state.active = len(left)

    def decode(self, noise: Tensor, start: int, steps: int) -> int:
        """Sample up to `steps` more tokens of each active row. `noise`, float64 (R, X), is for the
        positions from `start` on. Returns the number of steps taken, which is smaller if no row is
        left."""
        done, noise = 0, noise.contiguous()
        self._drawing.use(noise, start)
        while done < steps and self._state.active:
            if self._state.length == self._own.slots:
                self._grow()
            few = min(steps - done, self._own.slots - self._state.length)
            structs = (self._model.struct, self._state, self._room, self._drawing.struct)
            done += call("rloo_decode", *map(ctypes.byref, structs), few)
        return done

    def _make_cache(self, rows: int, slots: int) -> _Tokens:
        """An uninitialized cache. It is zeros if its panels have columns that are never written."""
        sizes, step = self._model.sizes, columns()
        wide = round_up(sizes.size) // step
        make = torch.empty if sizes.size % step == 0 else torch.zeros
        key = (rows, sizes.key_heads, slots // step, sizes.size, step)
        value = (rows, sizes.key_heads, wide, slots, step)
        layers = range(self._model.num_layers)
        return _Tokens([make(key) for _ in layers], [make(value) for _ in layers])

    def _grow(self) -> None:
        """Double the slots of the active rows, up to the number that can be used."""
        left, old = self._places[self.rows], self._own
        new = self._make_cache(len(left), min(2 * old.slots, round_up(self._drawing.width)))
        for layer in range(self._model.num_layers):
            part = old.keys[layer]
            new.keys[layer][:, :, : part.shape[2]] = part[left]
            part = old.values[layer]
            new.values[layer][:, :, :, : old.slots] = part[left]
            old.keys[layer] = old.values[layer] = part[:0]  # frees the old cache layer by layer
        self._places[self.rows] = torch.arange(len(left))
        self._own = new
        self._state.own = new.struct

    def _make_room(self, rows: int) -> tuple[Any, list[Tensor]]:
        sizes, threads = self._model.sizes, torch.get_num_threads()
        heads = sizes.heads + 2 * sizes.key_heads
        widths = {
            "hidden": sizes.hidden,
            "states": heads * sizes.size,
            "attended": sizes.heads * sizes.size,
            "gated": sizes.inner,
            "logits": sizes.vocabulary,
        }
        widths = {name: round_up(width) for name, width in widths.items()}
        arrays = {name: torch.zeros(rows, width) for name, width in widths.items()}
        slots = self._prompts.slots + 2 * round_up(self._drawing.width)
        repeats = sizes.heads // sizes.key_heads
        scores = max(_SCORES, repeats * (slots + sizes.size + round_up(sizes.size)))
        more = torch.empty(threads, rows), torch.empty(threads, scores)
        room = _Room(
            **{name: array.data_ptr() for name, array in arrays.items()},
            scales=more[0].data_ptr(),
            **{f"{name}_stride": width for name, width in widths.items()},
            scores=more[1].data_ptr(),
            score_room=scores,
        )
        return room, [*arrays.values(), *more]


def _whole_slots(states: Tensor) -> Tensor:
    """Pad (.., L, D) to full panels of tokens."""
    length = states.shape[-2]
    return F.pad(states, (0, 0, 0, round_up(length) - length))


class _Tokens:
    """A KV cache in panels: keys (B, H_kv, slots / columns, D, columns) and values (B, H_kv,
    ceil(D / columns), slots, columns) of each layer."""

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys, self.values = keys, values
        self.slots = values[0].shape[3]
        pointers = _POINTER * len(keys)
        self._pointers = [pointers(*(x.data_ptr() for x in part)) for part in (keys, values)]
        self.struct = _Cache(*(ctypes.cast(x, _POINTER) for x in self._pointers), self.slots)


class TokenSampling:
    """The sampling settings, and the outputs: `tokens` int64 and `logprobs` float32, both (R, W).
    The caller must fill the first column of both before it creates the object."""

    def __init__(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        limits: Tensor,
        stops: Tensor,
        *,
        temperature: float,
        greedy: bool,
    ) -> None:
        self.width: int = tokens.shape[1]
        last = tokens[:, 0].clone()
        self._kept = tokens, logprobs, limits, stops, last
        self.struct: ctypes.Structure = _Drawing(
            temperature=temperature,
            greedy=int(greedy),
            stops=stops.data_ptr(),
            num_stops=len(stops),
            limits=limits.data_ptr(),
            next=last.data_ptr(),
            tokens=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            width=self.width,
        )

    def use(self, noise: Tensor, start: int) -> None:
        """Set the noise, float64 (R, X), for the positions from `start` on."""
        self._noise = noise
        self.struct.noise = noise.data_ptr()
        self.struct.noise_width, self.struct.noise_from = noise.shape[1], start
