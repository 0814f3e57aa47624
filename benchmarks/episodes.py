"""Tests whether episodes leak. Each environment of 10,000 episodes has a session of a server, and
sometimes fails. `PYTHONPATH=src python -m benchmarks.episodes [NUMBER]`

There is no model. Turns are fixed, so that only the cost of tools and environments is measured.

With `turns` instead of a number, the command measures the time of episodes of several turns on the
native engine, with and without the reuse of its caches. A random model generates the turns, without
tool calls.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from rloo.engines.native.native_engine import NativeEngine
from rloo.engines.sampling import sample_indices
from rloo.episodes.environments import EnvironmentPool, environment_tools
from rloo.episodes.multi_turn_engine import (
    EpisodeLimits,
    EpisodeSetup,
    MultiTurnEngine,
    kept_across_turns,
)
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from rloo.types import Completion, EngineCapabilities, Prompt, Sampling

NUMBER, PROMPTS, SAMPLES = 10_000, 16, 8
# One in this number of resets fails, one in this number of calls raises, and one exceeds its time.
FAILS, RAISES, HANGS = 50, 20, 500
SECONDS = 0.05
# A turn ends with one of 32 tokens of 1,024. All tokens are about equally likely. Answers are as
# long as turns.
VOCABULARY, TURN, TURNS, LENGTHS, GROUPS = 1024, 32, 4, (64, 256, 1024), 4
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Server:
    """An echo server that counts its open sessions."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self._socket.getsockname()
        self.open = self.most = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            session, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(session,), daemon=True).start()

    def _serve(self, session: socket.socket) -> None:
        with self._lock:
            self.open += 1
            self.most = max(self.most, self.open)
        try:
            # A client that leaves during an answer resets the connection.
            with session, suppress(ConnectionError):
                while told := session.recv(1024):
                    session.sendall(told)
        finally:
            with self._lock:
                self.open -= 1


class Room:
    """An environment with a session of the server."""

    address: tuple[str, int]
    chance = random.Random(0)

    def __init__(self) -> None:
        self._session = socket.create_connection(self.address)

    def reset(self, seed: int) -> None:
        """Begin."""
        self.seed = seed
        if self.chance.randrange(FAILS) == 0:
            raise ConnectionError

    def look(self, where: str) -> str:
        """Look.

        Args:
            where: Where to.
        """
        if self.chance.randrange(HANGS) == 0:
            time.sleep(60)
        if self.chance.randrange(RAISES) == 0:
            raise RuntimeError("dark")
        self._session.sendall(where.encode())
        return self._session.recv(1024).decode()

    def close(self) -> None:
        """Leave."""
        self._session.close()


class Given:
    """An engine with the same turns in every episode: calls, and then a word."""

    capabilities = EngineCapabilities(
        "given", copies_weights=False, shares_memory=True, exact_noise=True, filters=True
    )
    version = 0

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        call = {"name": "look", "arguments": {"where": "north"}}
        texts = [f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>", "Done.<|im_end|>"]
        self._turns = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def load(self, weights, version) -> None:
        """Do nothing: there are no weights."""

    def stats(self) -> dict[str, float]:
        """No statistics."""
        return {}

    def sample(self, prompts, samples, sampling, noise) -> list[list[Completion]]:
        """A call in the first two turns, then a word."""
        drawn = []
        for prompt, own in zip(prompts, sample_indices(samples, prompts), strict=True):
            turn = self._turns[prompt.offset > 200]
            drawn.append(
                [Completion(turn, "stop", [0.0] * len(turn), [0.0] * len(turn))] * len(own)
            )
        return drawn


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, with a chat template for tool calls."""
    letters = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(letters)}, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = TEMPLATE
    return fast


def main(number: int) -> None:
    """Run `number` episodes, close their environments, and print the remaining sessions and
    resources."""
    server, tokenizer = Server(), make_tokenizer()
    Room.address = server.address
    files = len(os.listdir("/proc/self/fd"))
    stage = EnvironmentPool({None: Room})
    tools = ToolSet(
        [],
        characters=1000,
        example=stage.examples[None],
        methods=environment_tools(stage.examples[None]),
    )
    dialect = find_renderer(tokenizer, [tokenizer.eos_token_id], {"tools": tools.schemas})
    engine = MultiTurnEngine(
        Given(tokenizer),
        {None: EpisodeSetup(tools, dialect)},
        EpisodeLimits(seconds=SECONDS),
        stage,
    )
    content = [{"role": "user", "content": "Look around."}]
    ids = dialect.template.encode(dialect.template.text(content))
    prompts = [Prompt(n, ids, content) for n in range(PROMPTS)]
    began, played, failed, errors = time.time(), 0, 0, 0
    rounds = -(-number // (PROMPTS * SAMPLES))
    for noise in range(rounds):
        for group in engine.sample(
            prompts, SAMPLES, Sampling(2000, (tokenizer.eos_token_id,)), noise
        ):
            told = [c.episode for c in group if c.episode is not None]
            played += len(told)
            failed += sum(episode.failed is not None for episode in told)
            errors += sum(episode.errors for episode in told)
        if noise == rounds // 2:
            half = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = time.time() - began
    stage.close()
    time.sleep(0.5)
    more = len(os.listdir("/proc/self/fd")) - files
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - half) / 1024
    print(
        f"{played} episodes, {failed} failed, {errors} errors of tools, in {seconds:.0f} s "
        f"({1000 * seconds / played:.2f} ms each)\n"
        f"sessions: at most {server.most} at once, {server.open} at the end\n"
        f"files: {more} more than before the first session\n"
        f"memory: {memory:.1f} MiB more than after half of them"
    )


def make_speaker() -> NativeEngine:
    """The native engine with a random model of 5 million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return NativeEngine(AutoModelForCausalLM.from_config(config).eval(), pad_token_id=0)


def speak(engine: NativeEngine, length: int, *, keep: bool) -> list[float]:
    """CPU seconds of each turn, over all episodes, with prompts of `length` tokens."""
    draws, seconds = random.Random(0), []
    sampling = Sampling(2 * TURNS * TURN * 4, tuple(range(VOCABULARY // TURN)))

    def tokens(count: int) -> list[int]:
        return [draws.randrange(VOCABULARY // TURN, VOCABULARY) for _ in range(count)]

    rows = [Prompt(n, tokens(length), "") for n in range(GROUPS)]
    numbers = [range(SAMPLES)] * GROUPS
    with kept_across_turns(engine) if keep else nullcontext():
        for _ in range(TURNS):
            began = time.process_time()
            said = engine.sample(rows, numbers, sampling, 1)
            seconds.append(time.process_time() - began)
            every = zip(rows, numbers, said, strict=True)
            spoken = [
                (row, k, [*c.token_ids, *tokens(TURN)])
                for row, own, group in every
                for k, c in zip(own, group, strict=True)
            ]
            rows = [
                replace(row, token_ids=row.token_ids + more, offset=row.offset + len(more))
                for row, _, more in spoken
            ]
            numbers = [range(k, k + 1) for _, k, _ in spoken]
    return seconds


def turns() -> None:
    """Measure turns on one thread, alternating with and without caches. Prints medians of three."""
    torch.set_num_threads(1)
    engine = make_speaker()
    speak(engine, LENGTHS[0], keep=True)
    print(f"{GROUPS} prompts, {SAMPLES} episodes each; processor seconds of turn 1, 2, ...")
    for length in LENGTHS:
        runs: dict[bool, list[list[float]]] = {True: [], False: []}
        for _ in range(3):
            for keep, done in runs.items():
                done.append(speak(engine, length, keep=keep))
        for keep, done in runs.items():
            middle = [sorted(turn)[1] for turn in zip(*done, strict=True)]
            each = ", ".join(f"{seconds:.2f}" for seconds in middle)
            what = "going on" if keep else "computed again"
            print(f"prompts of {length} tokens, {what}: {sum(middle):.2f} ({each})")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["turns"]:
        turns()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER)
