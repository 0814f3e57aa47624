"""Stop strings are found where decoding everything at each token finds them, by decoding little."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rloo.engines.sampling import StopStringMatcher
from rloo.types import Sampling
from support.markers import in_pairs
from support.models import CPU
from support.text import make_tokenizer

CORPUS = "the answer is 12, so: </answer> 'tis “sure” … 答え。ΣΨ🙂 do n't stop.\nObservation: END. "
# transformers has it only where it is asked for by this name.
CLEANS_TOO = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
STOPS = [
    ("</answer>",),
    ("\n",),
    ("\n\n", "END"),
    ("答え。",),
    ("…",),
    ("🙂🙂", "Σ。"),
    ("is ",),
    ("so: <", "e a"),
    ("don't", "do n"),
]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen have it: tokens of bytes, some of which cut characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback(**options) -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral have it: a space is part of the next word and stripped in front, and
    an unknown character is a token for each byte, all of which decode to nothing while it lasts."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted({char for char in CORPUS if char.isascii() and not char.isspace()})
    pieces += [
        "▁",
        "▁a",
        "▁an",
        "is",
        "▁is",
        "e▁a",
        "er",
        "</",
        "er>",
        "答",
        "do",
        "▁n",
        "▁do",
        "'t",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(dict.fromkeys(pieces))},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def bytes_alone(rows):
    return [bytes(row).decode("utf-8", "replace") for row in rows]


def pieces_of(name):
    """What decodes, and for each piece of a text a choice of its tokens."""
    if name == "bytes":
        return bytes_alone, lambda text: list(text.encode())
    made = byte_level() if name == "byte level" else byte_fallback()
    if name == "cleans up":
        made = byte_fallback(clean_up_tokenization_spaces=True, **{CLEANS_TOO: True})
    by_piece = dict(sorted(made.get_vocab().items()))
    if name == "byte level":
        letters = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str

        def encode(text):
            if random.random() < 0.5:  # each byte alone
                return [by_piece[c] for piece, _ in letters(text) for c in piece]
            return made.encode(text)

        return made.batch_decode, encode

    def spell(text):
        found, text = [], text.replace(" ", "▁")
        while text:
            known = [p for p in by_piece if text.startswith(p)]
            piece = random.choice(known) if known else text[0]
            text = text[len(piece) :]
            of_bytes = [by_piece[f"<0x{byte:02X}>"] for byte in piece.encode()]
            found += [by_piece[piece]] if known else of_bytes
        return found

    return made.batch_decode, spell


def make_rows(encode, length, count=6, extra=()):
    """Rows of `length` tokens: pieces of the corpus and of what stops, in any order and cut."""
    rows = []
    for _ in range(count):
        tokens = []
        while len(tokens) < length:
            begin = random.randrange(len(CORPUS))
            text = CORPUS[begin : begin + random.randrange(1, 12)]
            if extra and random.random() < 0.1:
                text = random.choice(extra)[: random.choice([1, 2, 5, None])]
            tokens += encode(text)
        rows.append(tokens[:length])
    return rows


def plain_search(decode, rows, stops, most):
    """The number of tokens at which the whole text first contains a stop string."""
    ends = []
    for row in rows:
        texts = decode([row[: n + 1] for n in range(len(row))])
        found = (n + 1 for n, text in enumerate(texts) if any(stop in text for stop in stops))
        ends.append(next(found, most))
    return ends


def search(decode, rows, stops, drop_finished=True):
    tokens, most = torch.tensor(rows), len(rows[0])
    watch = StopStringMatcher(Sampling(most, (), stop_strings=stops, decode=decode), len(rows), CPU)
    index = torch.randperm(len(rows))
    for position in range(most):
        ended = watch.update(tokens, index, position)
        assert torch.equal(ended, watch.lengths[index] <= position + 1)
        index = index[~ended] if drop_finished else index
        if not len(index):
            break
    return watch.lengths.tolist()


@pytest.mark.parametrize(
    ("stops", "name"), in_pairs(STOPS, ["byte level", "byte fallback", "cleans up", "bytes"])
)
def test_the_plain_search_finds_the_same(name, stops):
    random.seed(0)
    torch.manual_seed(0)
    decode, encode = pieces_of(name)
    rows = make_rows(encode, 40, 12, stops)
    if name == "cleans up":
        assert decode([encode("do n't .")]) == ["don't."]
    expected = plain_search(decode, rows, stops, 41)
    assert any(end < 41 for end in expected)
    assert search(decode, rows, stops) == expected
    assert search(decode, rows, stops, drop_finished=False) == expected


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "bytes"])
@pytest.mark.parametrize("stop", ["\n", "Ψ\n", "Ψa\n", "え\n", "Ψ", "Ψ" + "🙂" * 5])
def test_behind_many_characters_of_several_tokens(name, stop):
    """Of which a part, from within a character on, may decode to nothing readable at all."""
    random.seed(0)
    decode, encode = pieces_of(name)
    for size in range(2):
        for run in ("Σ", "🙂", "Σ🙂え"):
            row = encode("a" * size + run * 30 + stop + "aaa")
            expected = plain_search(decode, [row], [stop], len(row) + 1)
            assert expected < [len(row)]
            assert search(decode, [row], (stop,)) == expected


def test_words_that_are_joined_by_spaces():
    decode = make_tokenizer().batch_decode
    random.seed(0)
    rows = [[random.randrange(97) for _ in range(60)] for _ in range(10)]
    for stops in (("2 w5", "w12"), ("w3 ",), ("<bos>",)):
        expected = plain_search(decode, rows, stops, 61)
        assert any(end < 61 for end in expected)
        assert search(decode, rows, stops) == expected


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_few_tokens_are_decoded(name):
    random.seed(0)
    decode, encode = pieces_of(name)
    counts = {}
    for length in (200, 400):
        rows = make_rows(encode, length)
        decoded = 0

        def counting(given):
            nonlocal decoded
            decoded += sum(map(len, given))
            return decode(given)

        search(counting, rows, ("END of it all>",), drop_finished=False)
        counts[length] = decoded / (length * len(rows))
    assert max(counts.values()) < 0.6  # 23 where the last tokens are decoded at each
