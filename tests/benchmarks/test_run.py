"""The tool from the command line to the picture, on tiny problems."""

import sys

import pytest
import torch

from benchmarks import bars, plot, report, roofline, run, suites, summary

QUICK = ["--tiny", "--rounds", "1", "--commit", "test"]


def rows_of(tmp_path, device, *arguments):
    path = tmp_path / "cpu-rows.csv"
    code = run.main(["--device", device, *QUICK, "--output", str(path), *arguments])
    assert code == 0
    with path.open() as file:
        assert file.readline().strip().split(",") == list(report.FIELDS)
    return report.read_csv(path)


@pytest.mark.parametrize("name", suites.SUITES["cpu"])
def test_every_cpu_suite_runs(name, tmp_path, capsys):
    rows = rows_of(tmp_path, "cpu", "--suite", name)
    cases = suites.suite(name, "cpu", tiny=True)
    assert len({report.case_of(row) for row in rows}) == len(cases)
    for row in rows:
        assert row["suite"] == name
        assert row["note"] == ""
        assert row["milliseconds"] > 0 and row["bound_milliseconds"] > 0
        assert row["machine"] and row["instruction_set"] and row["commit"] == "test"
        assert row["torch"] == torch.__version__ and row["threads"] == torch.get_num_threads()
        assert row["peak_tflops"] > 0 and row["control_tflops"] > 0 and row["copy_gbytes"] > 0
        checked = row["error_out"] is not None
        assert checked or row["implementation"] == "copy" or "dropout" in row["options"]
    ours = [row for row in rows if row["implementation"] == "ours"]
    assert len(ours) == len(cases) and all(row["times_ours"] == 1 for row in ours)
    printed = capsys.readouterr().out
    assert "pass" in printed or "MISS" in printed or name == "naive"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["softmax", "forward", "backward", "decode"])
def test_cuda_suites_run(name, tmp_path):
    rows = rows_of(tmp_path, "cuda", "--suite", name)
    assert any(row["milliseconds"] for row in rows)
    assert all(row["driver"] and row["instruction_set"].startswith("sm_") for row in rows)


@pytest.mark.parametrize("kind", suites.SUITES)
def test_suites_have_budgets_and_no_case_twice(kind):
    assert suites.BUDGETS[kind].keys() == suites.SUITES[kind].keys()
    for name in suites.SUITES[kind]:
        for tiny in (False, True):
            cases = suites.suite(name, kind, tiny)
            assert len(cases) == len(set(cases)) > 1


def test_only_and_peers_choose(tmp_path):
    rows = rows_of(
        tmp_path, "cpu", "--suite", "forward", "--only", "fp32.*causal", "--peers", "ours"
    )
    assert {(r["implementation"], r["dtype"], r["options"]) for r in rows} == {
        ("ours", "fp32", "causal")
    }


def test_append_replaces_a_case_and_keeps_the_others(tmp_path):
    narrow = ("--suite", "forward", "--peers", "ours", "--only")
    rows_of(tmp_path, "cpu", *narrow, "1 x 2 x 24")
    rows = rows_of(tmp_path, "cpu", *narrow, "fp32 1 x 2 x 24", "--append", "--threads", "1")
    assert len(rows) == 4 and len({report.case_of(row) for row in rows}) == 4
    assert [row["dtype"] for row in rows] == ["bf16", "bf16", "fp32", "fp32"]


def test_a_suite_ends_when_its_time_is_over(capsys):
    run.main(["--device", "cpu", *QUICK, "--suite", "forward", "--budget", "0.001"])
    assert "no time left" in capsys.readouterr().out


def test_a_device_without_kernels_is_said_in_a_word(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.peers.devices_with_kernel", lambda op: ())
    rows = rows_of(tmp_path, "cpu", "--suite", "forward", "--only", "fp32.*causal")
    notes = {row["note"] for row in rows if row["implementation"] == "ours"}
    assert notes == {"skipped: flash_attention_forward has no kernel for cpu"}


def test_unknown_suites_of_a_device_are_refused():
    with pytest.raises(SystemExit):
        run.parse(["--device", "cpu", "--suite", "decode"])


def test_the_peak_is_above_the_matrix_product():
    """Of one thread, which may be disturbed: hence the factor."""
    library = roofline.compile_peak()
    if library is None:
        pytest.skip("no C++ compiler")
    peak = roofline.rate(library.flops_fp32, 1, quick=False)
    timer = roofline.CpuTimer()
    product = roofline.matrix_rate(timer, "cpu", "fp32", quick=False) / torch.get_num_threads()
    assert product < 1.3 * peak


def test_pictures_and_page_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows_of(tmp_path, "cpu", "--suite", "forward", "softmax")
    monkeypatch.setattr(summary, "RESULTS", tmp_path)
    front = tmp_path / "front.md"
    front.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    monkeypatch.setattr(summary, "README", front)
    assert plot.main([]) == 0
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == [
        "cpu-rows-forward.svg",
        "cpu-rows-softmax-backward.svg",
        "cpu-rows-softmax-forward.svg",
    ]
    before = [(tmp_path / name).read_bytes() for name in pictures]
    page = (tmp_path / "README.md").read_text()
    assert all(f"]({name})" in page for name in pictures)
    assert "| forward, times torch | 1.3 |" in page
    text = front.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| forward | forward | 20 |" in text and "/cpu-rows-forward.svg)" in text
    plot.main([])
    assert before == [(tmp_path / name).read_bytes() for name in pictures], "the same every time"


def test_committed_pages_are_those_of_the_committed_rows():
    files = summary.result_files()
    tables = {path.name: report.read_csv(path) for path in files}
    again = "run python -m benchmarks.plot"
    front = summary.README.read_text()
    assert front == summary.with_section(front, summary.front_section(tables)), again
    page = summary.RESULTS / "README.md"
    assert page.exists() == bool(files)
    if files:
        pictures = {path.name: summary.pictures_of(path) for path in files}
        assert page.read_text() == summary.summary(tables, pictures), again


def test_a_disturbed_suite_is_named():
    rows = [{"suite": name, "dtype": "fp32", "control_tflops": rate}
            for name, rate in (("forward", 1.0), ("backward", 0.95), ("options", 0.5))]  # fmt: skip
    (line,) = run.disturbances(rows)
    assert "during options the fp32 matrix product reached 50%" in line


# ---- Bars ----------------------------------------------------------------------------------------


def make_row(implementation, milliseconds, **fields):
    row = dict.fromkeys(report.FIELDS)
    row |= {"suite": "forward", "device": "cpu", "op": "flash_attention", "direction": "forward"}
    row |= {"dtype": "bf16", "shape": "", "options": "full", "batch": 1, "heads_q": 1}
    row |= {"heads_kv": 1, "len_q": 128, "len_k": 128, "head_dim": 64, "note": ""}
    row |= {"tflops": 1 / milliseconds, "gbytes": 1 / milliseconds} | fields
    return row | {"implementation": implementation, "milliseconds": milliseconds}


def verdict(text, rows):
    (found,) = [v for v in bars.evaluate(rows) if v.bar.text == text]
    return found


def test_geometric_mean_bar():
    rows = [make_row("ours", 1.0), make_row("torch", 1.0)]
    rows += [make_row("ours", 1.0, len_q=1), make_row("torch", 4.0, len_q=1)]
    found = verdict("forward, times torch", rows)
    assert found.value == pytest.approx(2.0) and found.holds and found.cases == 2


def test_bar_of_every_row_names_the_worst():
    rows = [make_row("ours", 1.0), make_row("torch", 2.0)]
    rows += [
        make_row("ours", 1.0, shape="slow", len_q=7),
        make_row("torch", 0.9, len_q=7, shape="slow"),
    ]
    found = verdict("every row, times torch", rows)
    assert not found.holds and found.value == pytest.approx(0.9)
    assert (found.passed, found.cases) == (1, 2) and "slow" in found.where
    assert str(found).startswith("MISS")


def test_bar_of_causal_rows_compares_rates():
    rows = [make_row("ours", 1.0), make_row("ours", 1.25, options="causal")]
    found = verdict("causal and window, rate of the full row's", rows)
    assert found.value == pytest.approx(0.8) and not found.holds


def test_bar_of_packed_rows_finds_the_dense_row():
    common = {"suite": "options", "len_q": 64, "batch": 4}
    rows = [make_row("ours", 1.0, **common), make_row("ours", 2.0, options="causal", **common)]
    packed = {"suite": "options", "len_q": 256, "len_k": 256}
    rows += [make_row("ours", 1.05, options="packed", **packed)]
    rows += [make_row("ours", 2.5, options="packed causal", **packed)]
    found = verdict("packed, rate of the dense row's", rows)
    assert found.value == pytest.approx(0.8) and (found.passed, found.cases) == (1, 2)


def test_bar_of_gradient_errors_takes_the_worst_gradient():
    errors = {"error_query": 1e-3, "error_key": 2e-3, "error_value": 1e-3}
    ours = make_row("ours", 1.0, suite="accuracy", **errors)
    theirs = make_row("torch math", 1.0, suite="accuracy", **(errors | {"error_key": 1e-3}))
    found = verdict("bf16 gradients, error of torch's math path over ours", [ours, theirs])
    assert found.value == pytest.approx(0.5) and not found.holds


def test_bars_of_softmax_on_a_gpu():
    common = {"suite": "softmax", "device": "cuda", "op": "softmax", "shape": "8 x 512"}
    common |= {"len_k": 512, "batch": None}
    rows = [make_row("ours", 1.0, **common), make_row("copy", 0.99, **common)]
    rows += [make_row("torch", 1.5, **common)]
    assert verdict("softmax of 128 to 65,536, share of a copy", rows).holds
    assert verdict("softmax, times torch", rows).value == pytest.approx(1.5)
    assert len(bars.evaluate(rows)) == 2


def test_bar_of_memory_compares_lengths():
    rows = [
        make_row("ours", 1.0, device="cuda", len_q=n, len_k=n, extra_mib=float(mib))
        for n, mib in ((512, 100), (2048, 110), (16384, 300))
    ]
    found = verdict("extra memory at the shortest length over that at each", rows)
    assert found.value == pytest.approx(1 / 3) and (found.passed, found.cases) == (1, 2)


def test_a_row_without_a_time_has_no_say():
    rows = [make_row("ours", 1.0), make_row("torch", 1.0) | {"milliseconds": None}]
    assert not [v for v in bars.evaluate(rows) if "times torch" in v.bar.text]


def test_progress_works_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with report.Progress("title", 2) as progress:
        progress.step("a line")
    assert capsys.readouterr().out == "a line\n"
