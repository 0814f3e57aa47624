"""The files of rows of a run."""

from rloo.tracking.run_rows import JsonlWriter


def test_a_file_is_only_opened_for_a_sync_if_it_has_new_rows(tmp_path):
    writer = JsonlWriter(tmp_path, ("metrics.jsonl", "groups.jsonl"))
    path = tmp_path / "metrics.jsonl"
    writer.append("metrics.jsonl", [{"step": 1}])
    writer.sync()
    assert path.read_text() == '{"step": 1}\n' and not (tmp_path / "groups.jsonl").exists()
    path.unlink()
    writer.sync()  # to open it would make it again
    assert not path.exists()
    writer.append("metrics.jsonl", [{"step": 2}])
    writer.sync()
    assert path.read_text() == '{"step": 2}\n'
