"""Tokens drawn in C, beside the fused decoder in torch and a plain forward pass."""

import pytest
import torch
import transformers

from rloo import kernels
from rloo.engines.native import c_decoding
from rloo.engines.native import native_engine as native
from rloo.engines.native.fused_decoder import FusedDecoder
from rloo.engines.native.native_engine import NativeEngine
from rloo.kernels.decode import DecodingRows, round_up
from rloo.types import Prompt, Sampling
from support.engines import expected_logprobs, rounding_errors
from support.models import COMMON, VOCAB_SIZE, WINDOW, disturb

WIDE = {"hidden_size": 80, "intermediate_size": 96, "head_dim": 40}
MANY_HEADS = {"num_attention_heads": 14, "num_key_value_heads": 1, "head_dim": 16}
CONFIGS = {
    "llama, biases": lambda: transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    # More than one block of the draw, and none that is whole.
    "qwen2, tied, 333 tokens": lambda: transformers.Qwen2Config(
        **(COMMON | {"vocab_size": 333}), tie_word_embeddings=True
    ),
    "qwen3, a head of 40": lambda: transformers.Qwen3Config(**(COMMON | WIDE)),
    "qwen3, 14 heads share keys": lambda: transformers.Qwen3Config(**(COMMON | MANY_HEADS)),
}
PROMPTS = [
    Prompt(number, [(5 * i + number) % VOCAB_SIZE for i in range(length)], "")
    for number, length in enumerate((3, 41, 7, 32))
]

pytestmark = pytest.mark.skipif(
    kernels.unavailable_reason() is not None, reason=str(kernels.unavailable_reason())
)


@pytest.fixture(autouse=True)
def _in_c():
    kernels.use(True)
    yield
    kernels.use(False)
    torch.set_num_threads(1)


def make(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).float().eval()
    disturb(model)
    return model


def make_engine(model, *, in_c=True, **options):
    kernels.use(in_c)
    engine = NativeEngine(model, pad_token_id=0, **options)
    engine.load(model.named_parameters, 0)
    assert (engine._model_in_c is not None) is in_c
    return engine


def sample(model, sampling, *, in_c=True, prompts=PROMPTS, samples=3, **options):
    return make_engine(model, in_c=in_c, **options).sample(prompts, samples, sampling, noise=5)


def flat(groups):
    return [completion for group in groups for completion in group]


def texts(groups):
    return [[(c.token_ids, c.finish) for c in group] for group in groups]


@pytest.fixture
def calls(monkeypatch):
    """How many waves were decoded in C."""
    counted, decode = [], c_decoding.decode

    def counting(*args):
        counted.append(1)
        return decode(*args)

    monkeypatch.setattr(c_decoding, "decode", counting)
    return counted


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_a_plain_forward(name, calls):
    """Past the first 64 slots of the cache, which then grows, with rows that have ended before."""
    model = make(name)
    groups = sample(model, Sampling(max_tokens=150, stop_token_ids=(4, 9)))

    assert calls == [1]
    lengths = [len(c.token_ids) for group in groups for c in group]
    assert min(lengths) < 64 < max(lengths)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            found = torch.tensor(completion.policy_logprobs)
            expected = expected_logprobs(model, prompt, completion)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
            assert completion.behavior_logprobs == completion.policy_logprobs


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": (4, 9, 31)},
        {"stop_token_ids": (), "temperature": 0.7},
        {"stop_token_ids": (4,), "greedy": True},
        {"stop_token_ids": tuple(range(60))},  # some rows end with their first token
    ],
)
def test_the_same_noise_draws_what_torch_draws(name, options, calls):
    model, sampling = make(name), Sampling(max_tokens=20, **options)
    mine, theirs = (sample(model, sampling, in_c=in_c) for in_c in (True, False))

    assert calls == [1]
    assert texts(mine) == texts(theirs)
    for one, other in zip(flat(mine), flat(theirs), strict=True):
        assert one.policy_logprobs == pytest.approx(other.policy_logprobs, abs=2e-5)
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=2e-5)


def test_no_token_is_computed_for_rows_that_have_ended(monkeypatch):
    made, decode_more = [], DecodingRows.decode

    def counting(self, *args):
        made.append((len(self.rows), decode_more(self, *args), len(self.rows)))
        return made[-1][1]

    monkeypatch.setattr(DecodingRows, "decode", counting)
    model = make("llama, biases")
    prompts = [Prompt(i, p.token_ids, "", offset=i * i) for i, p in enumerate(PROMPTS)]
    sample(model, Sampling(max_tokens=12, stop_token_ids=()), prompts=prompts, samples=1)
    assert made == [(4, 11, 0)]
    made.clear()
    short = Sampling(max_tokens=100, stop_token_ids=tuple(range(90)))
    groups = sample(model, short)
    longest = max(len(c.token_ids) for c in flat(groups))
    assert 1 < longest < 16
    assert sum(steps for _, steps, _ in made) == longest - 1


def test_limits_of_rows_and_stop_strings_end_them():
    def decode(ids):
        return ["".join(chr(48 + token) for token in row) for row in ids]

    model = make("llama, biases")
    prompts = [Prompt(i, p.token_ids, "", offset=i) for i, p in enumerate(PROMPTS)]
    sampling = Sampling(max_tokens=12, stop_token_ids=(4,), stop_strings=("A", "BC"), decode=decode)
    mine, theirs = (sample(model, sampling, prompts=prompts, in_c=c) for c in (True, False))

    assert texts(mine) == texts(theirs)
    for prompt, group in zip(prompts, mine, strict=True):
        assert max(len(c.token_ids) for c in group) <= 12 - prompt.offset
    one_token = Sampling(max_tokens=1, stop_token_ids=())
    assert texts(sample(model, one_token)) == texts(sample(model, one_token, in_c=False))


def test_prompts_are_computed_in_parts_where_they_are_many(monkeypatch):
    model, sampling = make("qwen3, a head of 40"), Sampling(max_tokens=4, stop_token_ids=())
    expected = sample(model, sampling)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 44)
    computed = []
    monkeypatch.setattr(FusedDecoder, "forward", noting(FusedDecoder.forward, computed))
    assert sample(model, sampling) == expected
    assert computed == [(1, 42), (1, 41)]  # of 3 + 7 + 32 tokens and of 41, and none of padding


def noting(forward, shapes):
    def noted(self, input_ids, *rest):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, *rest)

    return noted


def test_a_row_does_not_depend_on_the_others():
    model = make("qwen3, a head of 40")
    sampling = Sampling(max_tokens=70, stop_token_ids=(4, 9))
    together = sample(model, sampling, samples=13)
    assert [group[:3] for group in together] == sample(model, sampling, samples=3)

    few = make_engine(model, cache_bytes=1 << 17)
    assert few.capabilities.rows_at_once(52, 41, 70) < 52
    # Prompts of other waves are padded to other widths, which rounds their attention otherwise.
    assert texts(few.sample(PROMPTS, 13, sampling, noise=5)) == texts(together)


def test_two_threads_compute_what_one_does():
    model, sampling = make("qwen2, tied, 333 tokens"), Sampling(max_tokens=3, stop_token_ids=())
    alone = sample(model, sampling)
    torch.set_num_threads(2)
    assert sample(model, sampling) == alone


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.3}]
)
def test_filters_are_drawn_in_torch(options, calls):
    model = make("qwen2, tied, 333 tokens")
    sampling = Sampling(max_tokens=9, stop_token_ids=(), **options)

    assert texts(sample(model, sampling)) == texts(sample(model, sampling, in_c=False))
    assert calls == []


def test_windows_and_float64_are_computed_in_torch():
    windows = transformers.MistralConfig(**COMMON, sliding_window=WINDOW)
    for model in (
        transformers.AutoModelForCausalLM.from_config(windows).float().eval(),
        make("qwen2, tied, 333 tokens").double(),
    ):
        engine = NativeEngine(model, pad_token_id=0)
        engine.load(model.named_parameters, 0)
        assert engine._model_in_c is None
        assert engine.sample(PROMPTS, 1, Sampling(max_tokens=9, stop_token_ids=()), noise=0)


def test_in_bfloat16_logprobs_are_near_those_of_float32():
    model = make("qwen3, a head of 40")
    sampling = Sampling(max_tokens=20, stop_token_ids=())
    groups = sample(model, sampling, dtype=torch.bfloat16)
    errors = rounding_errors(model, PROMPTS, groups)
    # bfloat16 keeps 8 bits: rounding shows, and stays of the size of rounding.
    assert 1e-5 < errors.mean() < 0.05


def test_new_weights_are_used_and_diverged_ones_reported():
    model = make("llama, biases")
    engine = make_engine(model)
    sampling = Sampling(max_tokens=5, stop_token_ids=())
    before = engine.sample(PROMPTS, 2, sampling, noise=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    engine.load(model.named_parameters, 1)
    assert engine.sample(PROMPTS, 2, sampling, noise=0) != before
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    engine.load(model.named_parameters, 2)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.sample(PROMPTS, 2, sampling, noise=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("width", [16, 65, 131])
def test_caches_take_no_more_than_is_said(monkeypatch, name, width):
    """One completion a prompt, so that none shares its prompt's."""
    engine = make_engine(make(name))
    sizes, decode = [], DecodingRows.decode

    def measuring(wave, *args):
        done = decode(wave, *args)
        caches = wave._prompts, wave._own
        sizes.append(sum(x.nbytes for c in caches for x in (*c.keys, *c.values)))
        slots.append(wave._own.slots)
        return done

    slots = []
    monkeypatch.setattr(DecodingRows, "decode", measuring)
    engine.sample(PROMPTS, 1, Sampling(width, ()), noise=5)

    assert slots[-1] == round_up(width - 1)  # the last token is read by none
    assert max(sizes) <= len(PROMPTS) * engine.capabilities.bytes_per_row(41, width)
