"""Folders of runs that never ran: literal files, as a run leaves them."""

import json
from pathlib import Path

HOSTILE = '</script><script>window.owned=1</script>"><img src=x onerror="window.owned=1"> & <!-- '


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_metrics(step: int, steps: int) -> dict:
    done = step / steps
    return {
        "step": step,
        "reward": 0.2 + 0.6 * done,
        "reward/standard_error": 0.04,
        "rewards/right/mean": 0.1 + 0.6 * done,
        "rewards/format/mean": 0.1,
        "groups/signal": 0.9 - 0.3 * done,
        "kl": 0.3 * done**2,
        "entropy": 1.5 - done,
        "completions/mean_length": 40 + 60 * done,
        "completions/clipped_ratio": 0.5 * done,
        "update/nonfinite": 0.0,
        "grad_norm": 1.0 + 9.0 * (step == steps // 2),
        "learning_rate": 1e-5,
        "mismatch/mean": 4e-7,
        "mismatch/max": 1e-5,
        "time/sample": 1.5,
        "time/update": 2.5,
        "step_time": 4.0,
        "wall_time": 5.0 * step,
        "num_tokens": 1000.0 * step,
    }


def make_groups(step: int, text: str, count: int) -> list[dict]:
    tokens = [text, *(f" w{i}" for i in range(30)), "<eos>"]
    completions = [
        {
            "completion": "".join(tokens),
            "reward": float(k % 2),
            "scores": {"right": float(k % 2), "format": 0.5},
            "finish": "length" if k == 1 else "stop",
            "num_tokens": len(tokens),
            "advantage": 0.5 if k % 2 else -0.5,
            "tokens": tokens,
            "mismatch": [1e-7 * (i % 5) for i in range(len(tokens))],
        }
        for k in range(count)
    ]
    prompt = [{"role": "user", "content": f"What is {text}?"}]
    row = {"step": step, "prompt": prompt, "num_completions": count, "completions": completions}
    return [{**row, "prompt_id": n, "group": n} for n in range(2)]


def make_run(
    folder: Path, *, steps: int = 20, text: str = HOSTILE, ended: bool = True, **options: object
) -> Path:
    """A run that rises, is cut off more and more, and has findings."""
    folder.mkdir(parents=True)
    write_rows(folder / "metrics.jsonl", [make_metrics(n, steps) for n in range(1, steps + 1)])
    moments = sorted({1, steps // 2, steps})
    write_rows(folder / "groups.jsonl", [g for s in moments for g in make_groups(s, text, 4)])
    held_out = [
        {"step": s, "name": n, "pass@1": p, "pass@1_interval": [p - 0.1, p + 0.1], "reward": p}
        for s, n, p in ((0, "start", 0.2), (steps // 2, "during", 0.5), (steps, "end", 0.8))
    ]
    write_rows(folder / "evaluations.jsonl", held_out)
    summary = {
        "status": "finished",
        "steps": steps,
        "max_steps": steps,
        "start": held_out[0],
        "end": held_out[2],
        "wall_seconds": 100.0,
        "peak_resident_bytes": 2_000_000_000,
        "notes": [f"a note of {text}"],
        "verdict": f"pass@1 rose.\nThe function is called {text}.",
        "findings": [
            {
                "name": "truncation", "title": "Completions are cut off",
                "evidence": f"50 % in the end: {text}", "why": "They count as wrong.",
                "change": "let them be longer", "command": "rloo train --max_completion_length 128",
                "examples": [text],
            }
        ],
        "config": {"max_completion_length": 100, "learning_rate": 1e-5, "model": text, **options},
        "named": ["learning_rate", "max_completion_length", "model", *options],
        "versions": {"python": "3.11", "rloo": "0.1.0"},
    }  # fmt: skip
    if ended:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
