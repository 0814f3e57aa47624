"""The loggers of transformers, each with its real package and offline: a run of two steps, and what
the logger wrote of it, against the run's own files."""

import csv
import html
import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).resolve().parents[2] / "src")

pytestmark = pytest.mark.peers

OFFLINE = {
    "tensorboard": {},
    "wandb": {"WANDB_MODE": "offline"},
    "trackio": {"TRACKIO_DIR": "data"},
    "mlflow": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"},
    "comet_ml": {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "comet"},
}
# Comet would record what MLflow is sent, where both are installed.
QUIET = {"HF_HUB_OFFLINE": "1", "COMET_DISABLE_AUTO_LOGGING": "1", "PYTHONPATH": SOURCE}


def run(logger, folder, **environment):
    command = [
        sys.executable, "-m", "rloo", "train", "--report_to", logger, "--output_dir", "run",
        "--max_steps", "2", "--num_prompts", "2", "--num_generations", "4", "--logging_steps", "1",
        "--max_completion_length", "8", "--eval_strategy", "no", "--eval_on_start", "false",
        "--log_completions", "--run_name", "first", "--project", "sums", "--num_threads", "1",
    ]  # fmt: skip
    given = {**os.environ, **QUIET, **OFFLINE[logger], **environment}
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)


@pytest.fixture(scope="module", params=OFFLINE)
def tracked(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    done = run(request.param, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return request.param, folder


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def test_every_metric_of_each_step_and_every_completion_are_in_what_the_logger_wrote(tracked):
    logger, folder = tracked
    metrics, table = READERS[logger](folder)
    steps = rows_of(folder, "metrics.jsonl")
    assert [row["step"] for row in steps] == sorted(metrics) == [1, 2]
    for row in steps:
        for name, value in row.items():
            if name != "step" and name in NUMBERS:
                assert metrics[row["step"]][name] == pytest.approx(value), (logger, name)
    sampled = rows_of(folder, "completions.jsonl")
    assert len(table) == len(sampled) == 16
    ours = {(row["step"], row["prompt"], row["completion"], row["reward"]) for row in sampled}
    assert {(int(s), p, c, float(r)) for s, p, c, r in table} == ours


NUMBERS = (
    "reward", "reward/standard_error", "entropy", "kl", "grad_norm", "learning_rate", "loss",
    "completions/mean_length", "rewards/countdown_reward/mean",
)  # fmt: skip
COLUMNS = ("step", "prompt", "completion", "reward")


def without_prefix(values):
    return {name.removeprefix("train/"): value for name, value in values.items()}


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (written,) = (folder / "run" / "runs").iterdir()
    events = EventAccumulator(str(written))
    events.Reload()
    metrics = {1: {}, 2: {}}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            metrics[event.step][name.removeprefix("train/")] = event.value
    table = []
    for event in events.Tensors("completions/text_summary"):
        lines = event.tensor_proto.string_val[0].decode().splitlines()
        names, _, *rows = [line[2:-2].split(" | ") for line in lines]
        assert all(row[names.index("step")] == str(event.step) for row in rows)
        places = [names.index(name) for name in COLUMNS]
        table += [[html.unescape(row[place]) for place in places] for row in rows]
    return metrics, table


def records_of(path):
    """The records of a file in LevelDB's log format, which starts with a head of seven bytes."""
    written, place, whole = path.read_bytes(), 7, b""
    while place < len(written):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", written[place + 4 : place + 7])
        whole += written[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def read_wandb(folder):
    from wandb.proto import wandb_internal_pb2

    (written,) = (folder / "wandb").glob("offline-run-*")
    metrics, project = {}, None
    for data in records_of(next(written.glob("*.wandb"))):
        record = wandb_internal_pb2.Record.FromString(data)
        project = record.run.project or project
        row = {i.key or ".".join(i.nested_key): i.value_json for i in record.history.item}
        if "train/reward" in row:
            values = without_prefix({name: json.loads(value) for name, value in row.items()})
            metrics[values["global_step"]] = values
    assert project == "sums"
    return metrics, tables_of(written.glob("files/media/table/*.json"))


def tables_of(paths):
    table = []
    for path in paths:
        written = json.loads(path.read_text())
        places = [written["columns"].index(name) for name in COLUMNS]
        table += [[row[place] for place in places] for row in written["data"]]
    return table


def read_trackio(folder):
    metrics, table = {}, []
    with sqlite3.connect(folder / "data" / "sums.db") as database:
        rows = [json.loads(row[0]) for row in database.execute("select metrics from metrics")]
    for row in rows:
        if "completions" in row:
            table += [[r[name] for name in COLUMNS] for r in row["completions"]["_value"]]
        elif "train/reward" in row:
            metrics[row["train/global_step"]] = without_prefix(row)
    return metrics, table


def read_mlflow(folder):
    metrics = {1: {}, 2: {}}
    with sqlite3.connect(folder / "mlflow.db") as database:
        asked = "select r.name, e.name from runs r join experiments e using (experiment_id)"
        assert database.execute(asked).fetchall() == [("first", "sums")]
        for name, value, step in database.execute("select key, value, step from metrics"):
            metrics[step][name] = value
    return metrics, tables_of((folder / "mlruns").rglob("artifacts/completions.json"))


def read_comet(folder):
    (written,) = (folder / "comet").glob("*.zip")
    metrics, table = {1: {}, 2: {}}, []
    with zipfile.ZipFile(written) as opened:
        for line in opened.read("messages.json").splitlines():
            message = json.loads(line)
            payload = message["payload"]
            point = payload.get("metric") or {}
            if point.get("step"):  # none for those of the machine
                values = metrics[point["step"]]
                values[point["metricName"].removeprefix("train/")] = point["metricValue"]
            elif payload.get("upload_type") == "dataframe":
                lines = io.StringIO(opened.read(payload["file_path"]).decode())
                table += [[row[name] for name in COLUMNS] for row in csv.DictReader(lines)]
    return metrics, table


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
    "comet_ml": read_comet,
}


def test_a_folder_as_mlflows_store_which_would_lose_metrics_is_refused_before_the_first_sample(
    tmp_path,
):
    uri = f"file:{tmp_path / 'mlruns'}"
    done = run("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri, MLFLOW_ALLOW_FILE_STORE="true")
    assert done.returncode == 2 and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert f"MLflow's tracking URI is {uri}, a folder" in done.stderr
