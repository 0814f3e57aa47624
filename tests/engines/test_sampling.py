import math

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rloo.engines.counter_rng import noise_key, row_keys, uniforms
from rloo.engines.sampling import (
    check_request,
    collect_completions,
    draw,
    filter_logits,
    invert_cdf,
)
from rloo.types import Completion, Prompt, Sampling


def make_keys(prompts: int, samples: int, noise: int = 5) -> torch.Tensor:
    ids = torch.arange(prompts).repeat_interleave(samples)
    return row_keys(noise, ids, torch.arange(samples).repeat(prompts))


def test_noise_key_is_a_64_bit_number_that_depends_on_everything():
    keys = {
        noise_key(seed, purpose, step)
        for seed in range(10)
        for purpose in ("train", "eval")
        for step in range(10)
    }

    assert len(keys) == 200
    assert all(0 <= key < 2**64 for key in keys)
    assert noise_key(1, "train", 2) == noise_key(1, "train", 2)


def test_noise_is_splitmix64():
    # The published first outputs of SplitMix64 with seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]

    values = uniforms(torch.tensor([1234567]), 0, 3)[0].tolist()

    assert values == [(number >> 11) * 2.0**-53 for number in expected]


def test_noise_of_a_row_does_not_depend_on_the_other_rows_or_the_block():
    together = uniforms(make_keys(3, 4), 0, 50)

    alone = uniforms(row_keys(5, torch.tensor([2]), torch.tensor([1])), 20, 10)

    assert torch.equal(together[9, 20:30], alone[0])


def test_noise_is_uniform():
    values = uniforms(make_keys(100, 20), 0, 100).flatten()

    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert abs(float(values.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / len(values))
    assert abs(float(values.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / len(values))
    counts = torch.histc(values, bins=256, min=0.0, max=1.0)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_noise_of_neighbours_is_independent():
    values = uniforms(make_keys(100, 20), 0, 100).view(100, 20, 100)
    neighbours = {
        "position": (values[:, :, :-1], values[:, :, 1:]),
        "sample": (values[:, :-1], values[:, 1:]),
        "prompt": (values[:-1], values[1:]),
        "sample against position": (values[:, :-1, 1:], values[:, 1:, :-1]),
        "step": (values.flatten(), uniforms(make_keys(100, 20, noise=6), 0, 100).flatten()),
    }

    for name, (first, second) in neighbours.items():
        cells = (first.flatten() * 16).long() * 16 + (second.flatten() * 16).long()
        pvalue = stats.chisquare(cells.bincount(minlength=256).numpy()).pvalue
        assert pvalue > 1e-4, name


def test_noise_repeats_no_row():
    values = uniforms(make_keys(300, 30), 0, 1)

    assert len(values.unique()) == 9000


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 500},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.0},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {
            "temperature": 1.4,
            "top_k": 20,
            "top_p": 0.8,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
        },
    ],
)
@pytest.mark.parametrize("vocabulary", [97, 3000])
def test_filtered_distribution_equals_that_of_transformers(options, vocabulary):
    torch.manual_seed(0)
    logits = torch.randn(6, vocabulary) * 3
    # Nearly uniform: a nucleus larger than any shortlist.
    logits[5] /= 1000
    context = torch.randint(vocabulary, (6, 10))
    sampling = Sampling(max_tokens=1, stop_token_ids=(), **options)
    theirs = LogitsProcessorList()
    if "repetition_penalty" in options:
        theirs.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    theirs.append(TemperatureLogitsWarper(options.get("temperature", 1.0)))
    if "top_k" in options:
        theirs.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        theirs.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        theirs.append(MinPLogitsWarper(options["min_p"]))
    seen = torch.zeros(6, vocabulary, dtype=torch.bool).scatter_(1, context, True)

    ours = filter_logits(logits, sampling, seen)

    expected = theirs(context, logits.clone())
    assert torch.equal(ours.isinf(), expected.isinf())
    torch.testing.assert_close(ours.softmax(-1), expected.softmax(-1), atol=1e-7, rtol=0)


@pytest.mark.parametrize("vocabulary", [1, 11, 97, 128, 129, 1000])
def test_inverse_cdf_chooses_the_token_that_the_plain_sum_chooses(vocabulary):
    torch.manual_seed(0)
    scores = torch.randn(1, vocabulary).expand(2000, -1) * 3
    noise = torch.rand(2000, dtype=torch.float64)

    tokens, logprobs = invert_cdf(scores, noise)

    cumulated = scores[0].double().softmax(-1).cumsum(-1)
    assert (noise < cumulated[tokens] + 1e-6).all()
    assert (noise >= cumulated[tokens] - scores[0].double().softmax(-1)[tokens] - 1e-6).all()
    expected = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)


def test_inverse_cdf_never_chooses_what_was_removed():
    scores = torch.full((4, 300), -math.inf)
    scores[:, [3, 130, 131, 290]] = torch.tensor([0.0, -40.0, 0.0, -1.0])
    noise = torch.tensor([0.0, 0.5, 1 - 2**-53, 0.423], dtype=torch.float64)

    tokens, logprobs = invert_cdf(scores, noise)

    assert tokens.tolist() == [3, 131, 290, 131]
    assert logprobs.isfinite().all()


def test_inverse_cdf_skips_a_first_block_without_probability():
    scores = torch.full((1, 300), -math.inf)
    scores[:, 200] = 0.0

    tokens, logprobs = invert_cdf(scores, torch.tensor([0.0]).double())

    assert tokens.tolist() == [200]
    assert logprobs.tolist() == [0.0]


def test_inverse_cdf_reaches_each_of_many_rare_tokens():
    # 128 tokens of probability 2^-30 each behind a likely one: float32 could not tell them apart.
    scores = torch.full((128, 256), -math.inf)
    scores[:, 0] = 0.0
    scores[:, 128:] = -30 * math.log(2)
    likely = 1 / (1 + 128 * 2.0**-30)
    noise = likely + (torch.arange(128).double() + 0.5) * 2.0**-30

    tokens, _ = invert_cdf(scores, noise)

    assert tokens.tolist() == list(range(128, 256))


def test_policy_logprobs_come_before_the_filters_and_sampling_logprobs_after():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampling = Sampling(max_tokens=1, stop_token_ids=(), temperature=0.5, top_k=2)

    drawn = draw(logits, torch.tensor([0.95]).double(), sampling)

    # After top-k 2 the first token keeps 1 / (1 + e^-2) = 0.881.
    assert drawn.tokens.tolist() == [1]
    total = math.exp(4) + math.exp(2) + 1 + math.exp(-2)
    assert drawn.policy_logprobs.item() == pytest.approx(2 - math.log(total), abs=1e-6)
    assert drawn.behavior_logprobs.item() == pytest.approx(-math.log(1 + math.exp(2)), abs=1e-6)


def test_greedy_ignores_temperature_filters_and_noise():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    sampling = Sampling(
        max_tokens=1,
        stop_token_ids=(),
        temperature=0.1,
        top_k=1,
        repetition_penalty=9.0,
        greedy=True,
    )

    drawn = draw(logits, torch.tensor([0.999]).double(), sampling)

    assert drawn.tokens.tolist() == [1]
    assert drawn.behavior_logprobs.tolist() == [0.0]
    expected = 3 - math.log(1 + math.exp(3) + math.exp(1))
    assert drawn.policy_logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_low_precision_logits_are_drawn_in_float32():
    logits = torch.randn(3, 50).bfloat16()
    noise = torch.rand(3).double()
    sampling = Sampling(max_tokens=1, stop_token_ids=(), temperature=0.7)

    low, full = draw(logits, noise, sampling), draw(logits.float(), noise, sampling)

    assert torch.equal(low.tokens, full.tokens)
    assert low.policy_logprobs.dtype == torch.float32
    assert torch.equal(low.policy_logprobs, full.policy_logprobs)


def test_completions_end_at_the_first_stop_token():
    tokens = torch.tensor([[5, 2, 2, 9], [5, 6, 7, 8], [3, -1, -1, -1], [5, 6, 7, 2]])
    logprobs = -torch.arange(16.0).view(4, 4)

    never = torch.full((4,), 5)
    completions = collect_completions((tokens, logprobs, logprobs * 2, never), (2, 3), [4] * 4)

    assert completions == [
        Completion([5, 2], "stop", [0.0, -1.0], [0.0, -2.0]),
        Completion([5, 6, 7, 8], "length", [-4.0, -5.0, -6.0, -7.0], [-8.0, -10.0, -12.0, -14.0]),
        Completion([3], "stop", [-8.0], [-16.0]),
        Completion([5, 6, 7, 2], "stop", [-12.0, -13.0, -14.0, -15.0], [-24, -26, -28, -30]),
    ]


def test_completions_end_where_a_stop_string_or_a_stop_token_comes_first():
    tokens = torch.tensor([[5, 6, 2, 9], [5, 2, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    zeros = torch.zeros(4, 4)

    completions = collect_completions(
        (tokens, zeros, zeros, torch.tensor([2, 3, 4, 5])), (2,), [4] * 4
    )

    assert [list(c.token_ids) for c in completions] == [[5, 6], [5, 2], [5, 6, 7, 8], [5, 6, 7, 8]]
    assert [c.finish for c in completions] == ["stop", "stop", "stop", "length"]


def test_logits_that_are_not_numbers_are_reported():
    sampling = Sampling(max_tokens=1, stop_token_ids=())
    drawn = draw(torch.full((1, 300), math.nan), torch.tensor([0.5]).double(), sampling)
    record = (
        drawn.tokens[:, None],
        drawn.policy_logprobs[:, None],
        drawn.behavior_logprobs[:, None],
        torch.tensor([2]),
    )

    with pytest.raises(FloatingPointError, match="not finite"):
        collect_completions(record, (), [1])


def test_requests_that_no_engine_can_serve_are_refused():
    prompt = Prompt(7, [1], "")
    good = Sampling(max_tokens=1, stop_token_ids=())

    check_request([prompt], 1, good)
    with pytest.raises(ValueError, match="num_samples is 0"):
        check_request([prompt], 0, good)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        check_request([prompt], 1, Sampling(max_tokens=0, stop_token_ids=()))
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        check_request([prompt], 1, Sampling(max_tokens=1, stop_token_ids=(), temperature=0.0))
    with pytest.raises(ValueError, match="there are stop_strings but no decode"):
        check_request([prompt], 1, Sampling(1, (), stop_strings=("x",)))
    with pytest.raises(ValueError, match="prompt 7 has no tokens"):
        check_request([Prompt(7, [], "")], 1, good)
