"""The pieces of tools/bench: groups of ranks, rows in the common form, and systems that train alike."""

from __future__ import annotations

import dataclasses
import glob
import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "tools" / "bench"
RANK_CODE = '''
import pathlib, socket

def send(rank, num_bytes):
    """From rank 0 to rank 1."""
    if rank.rank == 1:
        with socket.create_server(("127.0.0.1", rank.port + 1)) as server:
            rank.meet()
            source, _ = server.accept()
            while num_bytes:
                num_bytes -= len(source.recv(num_bytes))
    else:
        rank.meet()
        with socket.create_connection(("127.0.0.1", rank.port + 1)) as out:
            out.sendall(bytes(num_bytes))
    rank.meet()
    return rank.rank

def fail(rank):
    if rank.rank == 1:
        raise LookupError("the second rank has a reason")
    rank.meet()

def litter(rank, folder):
    pathlib.Path(folder, f"left-{rank.port}-{rank.rank}").touch()

def wait_for_ever(rank):
    if rank.rank == 0:
        rank.meet()
    while True:
        rank._connection.recv()
'''


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Import a module of tools/bench by name; ``rank_code`` is one whose functions ranks can run."""
    (tmp_path / "rank_code.py").write_text(RANK_CODE)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module


def run(bench, name, *args, timeout_s=60.0, **kwargs):
    function = getattr(bench("rank_code"), name)
    return bench("rank_group").run_group(function, 2, *args, timeout_s=timeout_s, environment={}, **kwargs)


def test_traffic_of_the_group_is_counted(bench) -> None:
    result = run(bench, "send", 10_000_000)
    assert result.results == [0, 1]
    assert result.loopback_bytes >= 10_000_000
    if result.is_private:
        assert result.loopback_bytes <= 10_200_000  # headers


def test_a_failing_rank_is_named_with_its_reason(bench) -> None:
    with pytest.raises(bench("rank_group").GroupError, match=r"(?s)rank 1: .*the second rank has a reason"):
        run(bench, "fail")


def test_a_group_that_is_stuck_is_ended(bench) -> None:
    with pytest.raises(bench("rank_group").GroupError, match="not done within 3 s"):
        run(bench, "wait_for_ever", timeout_s=3.0)


def test_only_files_of_this_group_are_removed(bench, tmp_path) -> None:
    (tmp_path / "left-1-of-another").touch()
    run(bench, "litter", str(tmp_path), litter=f"{tmp_path}/left-{{port}}-*")
    assert glob.glob(f"{tmp_path}/left-*") == [str(tmp_path / "left-1-of-another")]


def make_run(bench, *, cpu_s: float, wall_s: float, traffic: float, loss_last: float = 2.0):
    values = {
        "cpu_s_per_step": cpu_s,
        "wall_s_per_step": wall_s,
        "tokens_per_s": 128 / wall_s,
        "peak_bytes": 1e6,
        "traffic_per_parameter": traffic,
        "loss_last": loss_last,
    }
    return bench("training_report").Run(values=values, loss_first=3.0)


def make_rows(bench):
    runs = {
        "no communication": [make_run(bench, cpu_s=1.0, wall_s=1.0, traffic=0.0, loss_last=9.0)],
        "ds 1": [make_run(bench, cpu_s=c, wall_s=1.5, traffic=5.0) for c in (1.2, 9.0, 1.25)],
        "DDP": [make_run(bench, cpu_s=0.1, wall_s=0.1, traffic=4.0)],
        "DDP + ZeroRedundancyOptimizer": [make_run(bench, cpu_s=1.5, wall_s=1.2, traffic=6.0)],
    }
    case = bench("training_cases").CASES[0]
    report = bench("training_report")
    rows = report.rows_of(case, runs, {"DeepSpeed 1": "it\nfell"})
    return case, runs, {(row["system"], row.get("metric")): row for row in rows}


def test_ratios_say_how_many_times_better(bench) -> None:
    _, _, rows = make_rows(bench)
    cpu = rows["ds 1", "cpu_s_per_step"]
    assert cpu["value"] == 1.25  # the median of three rounds
    assert cpu["ratio_to_best_peer"] == 1.2  # against those of stage 1, so not against DDP
    assert cpu["ratio_to_limit"] == 0.8
    assert rows["ds 1", "tokens_per_s"]["ratio_to_best_peer"] == 0.8
    assert rows["ds 1", "traffic_per_parameter"]["ratio_to_limit"] == 0.8  # the formula says 4
    assert rows["ds 1", "exposed_s_per_step"]["value"] == 0.5
    assert rows["DDP", "cpu_s_per_step"]["ratio_to_best_peer"] is None


def test_every_row_has_the_common_form(bench) -> None:
    _, _, rows = make_rows(bench)
    keys = {"system", "case", "metric", "value", "unit", "ratio_to_best_peer", "ratio_to_limit"}
    assert {frozenset(row) for row in rows.values()} == {
        frozenset(keys),
        frozenset({"system", "case", "error"}),
    }
    assert rows["DeepSpeed 1", None]["error"] == "it\nfell"


def test_every_system_has_one_line_of_the_table(bench) -> None:
    _, _, rows = make_rows(bench)
    text = bench("training_report").markdown_of(list(rows.values()))
    assert "| DeepSpeed 1 | error: fell |" in text
    assert text.count("\n| ds 1 | 1.250 | 1.25 | 1.500 | 1.50 | 0.500 |") == 1


def test_a_loss_apart_from_the_others_is_found(bench) -> None:
    case, runs, _ = make_rows(bench)
    report = bench("training_report")
    assert report.disagreements(case, runs) == []  # without communication the last loss may be another
    runs["ds 1"] = [make_run(bench, cpu_s=1.0, wall_s=1.0, traffic=4.0, loss_last=2.01)]
    assert len(report.disagreements(case, runs)) == 1


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_systems_train_alike_and_traffic_is_what_events_say(bench) -> None:
    cases, report = bench("training_cases"), bench("training_report")
    sizes = {"vocabulary": 2048, "width": 256, "depth": 2, "num_steps": 4, "num_warmup": 1}
    case = dataclasses.replace(cases.CASES[0], **sizes)
    group, measure = bench("rank_group"), bench("training_rank").measure
    runs = {}
    for system in cases.SYSTEMS:
        if system.name in ("DDP", "ds 3"):
            environment = {"OMP_NUM_THREADS": "1"}
            result = group.run_group(measure, 2, system, case, timeout_s=120.0, environment=environment)
            runs[system.name] = [report.summarize(result, case)]
    assert report.disagreements(case, runs) == []
    values = runs["ds 3"][0].values
    formula = 3 * 4 / 2  # gather, gather, reduce: three elements of 4 bytes times (N - 1) / N
    assert values["traffic_per_parameter_by_events"] == pytest.approx(formula, rel=0.01)  # padding, norms
    if result.is_private:
        assert values["traffic_per_parameter"] == pytest.approx(formula, rel=0.1)  # headers of small messages
