"""The report of a run: right figures, plain about what is missing, the same bytes every time."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_course.errors import SettingError
from moe_course.models.config import ModelConfig
from moe_course.scaling.flops import MFU_FORMULA, parameter_counts, training_flops
from moe_course.train import figures
from moe_course.train.records import Run, against_baselines, entropy, mutual_information
from moe_course.train.report import write_report

DOMAINS = {
    # final held-out bits, unigram-to-n n-gram ladder, share of bytes
    "code": (2.60, [4.38, 3.35, 2.49, 2.07, 1.99], 0.4),
    "text": (3.02, [4.60, 3.65, 3.08, 2.59, 2.34], 0.25),
    "protein": (4.160, [4.182, 4.159, 4.149, 4.165, 4.337], 0.2),
    "dna": (1.981, [1.995, 1.986, 1.979, 1.970, 1.964], 0.15),
}


def fake_run(
    path: Path,
    *,
    steps: int = 400,
    domains=tuple(DOMAINS),
    layers: int = 3,
    dense: int = 1,
    experts: int = 16,
    top_k: int = 4,
    mtp: int = 0,
    finished: bool = True,
    seed: int = 0,
) -> Path:
    """A run as the training loop leaves it: ``layers`` MoE layers behind ``dense`` dense ones."""
    rng = np.random.default_rng(seed)
    routed = layers + mtp
    seq_len, batch = 256, 16
    tokens, targets = seq_len * batch, seq_len * batch - 7
    copies = tokens * top_k
    taste = rng.normal(size=(len(domains), routed, experts)) * (0.8 if len(domains) > 1 else 0.0)
    lines = []

    def bits(domain, step, noise=0.0):
        final, start = DOMAINS[domain][0], 8.04
        floor = final - 0.02
        fall = 0.35 * np.exp(-step / 120) + 0.65 * np.exp(-step / 12)
        return round(float(floor + (start - floor) * fall + (final - floor) + noise * rng.normal()), 5)

    def split(shares, total):
        counts = np.floor(shares / shares.sum(-1, keepdims=True) * total).astype(int)
        counts[..., 0] += total - counts.sum(-1)
        return counts

    for step in range(1, steps + 1):
        skew = np.exp(-step / 100) * np.linspace(2.2, -2.2, experts)
        load = (
            split(np.exp(skew[None] + 0.08 * rng.normal(size=(routed, experts))), copies) if routed else None
        )
        seconds = 24.0 if step == 1 else 0.55 * float(np.exp(0.06 * rng.normal()))
        bucket = 1 if step < 40 else 0
        seconds = 11.0 if step == 40 else seconds
        record = {
            "kind": "step",
            "step": step,
            "loss": 0.69 * bits(domains[0], step),
            "bits_per_byte": bits(domains[0], step),
            "bits_per_byte_by_domain": {
                name: None if rng.random() < 0.1 and step > 1 else bits(name, step, 0.06) for name in domains
            },
            "gradient_norm": 0.8,
            "learning_rate": 3e-3,
            "targets": targets,
            "tokens": tokens,
            "seconds": seconds,
        }
        if routed:
            ledger = dict.fromkeys(("made", "sent", "received", "computed", "combined"), copies * routed)
            record |= {
                "load": load.tolist(),
                "max_over_mean": (load.max(-1) / load.mean(-1)).tolist(),
                "demand": 2000 + int(900 * np.exp(-step / 50)),
                "capacity": 4096,
                "bucket": bucket,
                "ledger": ledger | {"dropped": 0},
                "balance_loss": [1.01] * routed,
                "bias_range": [0.1] * routed,
            }
        lines.append(record)
        if step == 40:
            lines.append(
                {"kind": "event", "step": 39, "event": "bucket", "text": "capacity 2048 -> 4096 rows"}
            )
        if step % 50 == 0 or (finished and step == steps):
            lines.append(
                {
                    "kind": "eval",
                    "step": step,
                    "bits_per_byte_by_domain": {name: bits(name, step) for name in domains},
                    "load_by_domain": {
                        name: split(np.exp(taste[i] * (1 - np.exp(-step / 150))), 50_000 * top_k).tolist()
                        for i, name in enumerate(domains)
                    },
                    "bytes_by_domain": dict.fromkeys(domains, 200_000),
                }
            )
    model = {
        "vocab_size": 264,
        "d_model": 128,
        "num_layers": layers + dense,
        "num_dense_layers": dense,
        "num_experts": experts,
        "top_k": top_k,
        "mtp_depth": mtp,
        "compute_dtype": "float32",
    }
    config = {
        "preset": "tiny",
        "model": model,
        "mesh": {"data": 1, "fsdp": 2, "expert": 4},
        "devices": 8,
        "seq_len": seq_len,
        "batch_size": batch,
        "steps": steps if finished else 2 * steps,
        "seed": 0,
    }
    summary = {
        "name": "tiny",
        "preset": "tiny",
        "started": "2026-11-29",
        "seconds": 300.0,
        "finished": finished,
        "versions": {"python": "3.11.9", "jax": "0.10.2", "flax": "0.12.8", "moe_course": "0.1.0"},
        "machine": {"cpu": "a two-core CPU", "cores": 2, "memory_gb": 15.6},
        "devices": {"count": 8, "kind": "cpu", "simulated": True},
        "parameters": {"total": 1_000_000, "active": 600_000},
        "sources": {
            name: {
                "description": f"{name} source",
                "notes": [],
                "train_bytes": 9_000_000,
                "held_out_bytes": 1_000_000,
            }
            for name in domains
        },
        "baselines": {name: DOMAINS[name][1] for name in domains},
        "peak": {
            "tflops_per_device": 0.0098,
            "dtype": "float32",
            "how": "measured: best of 7 float32 GEMMs of 2048^3",
        },
        "latency_ms": {
            "dispatch": 3.1,
            "combine": 2.2,
            "grouped_gemm": 9.4,
            "moe_layer": 19.0,
            "how": "forward, 4096",
        },
        "compilations": 3,
        "tokens_seen": tokens * steps,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def edit(path: Path, name: str, change) -> None:
    """Rewrite one JSON file of a run."""
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))


def edit_steps(path: Path, change) -> None:
    """Rewrite every step record of a run."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "step":
            change(record)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def cell(page: str, row: str, column: int) -> str:
    """A cell of the table row that starts with ``row``."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {row} |"))
    return line.split(" | ")[column].strip("| ")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def page(run_dir) -> str:
    return write_report(run_dir).read_text()


@pytest.fixture
def no_plots(monkeypatch):
    """Plots cost most of the time; tests of words leave them out."""
    for name in ("loss", "load", "domain", "speed"):
        monkeypatch.setattr(figures, f"{name}_figure", lambda run, path: None)


# The whole page


def test_head_gives_the_verdict(page):
    trained, held_out, ledger = [line for line in page.splitlines() if line.startswith("**")]
    assert (
        "3 of them with 16 experts, top 4 and 1 shared; 400 steps; 1.64 MB predicted; 5.0 minutes of steps"
        in trained
    )
    assert "8 simulated devices on 2 CPU cores" in trained
    assert "code 2.6" in held_out
    assert "beats order 1 (3.350), not order 2 (2.490)" in held_out
    assert "**Dropless.** 0 of 19,660,800 token copies dropped" in ledger
    assert "2,882 of 4,096 receive rows" in ledger
    assert "3 compilations, 1 change of bucket" in ledger
    assert "Missing here" not in page


def test_links_are_relative_and_their_pictures_exist(run_dir, page):
    links = [line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")]
    assert sorted(links) == [f"report/{name}.png" for name in ("domains", "load", "loss", "speed")]
    for link in links:
        content = (run_dir / link).read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", content[16:24])
        assert width > 1000
        assert 300 < height < 2000
    assert str(run_dir) not in page


def test_same_files_same_bytes(run_dir, page):
    before = {path.name: path.read_bytes() for path in (run_dir / "report").iterdir()}
    assert write_report(run_dir).read_text() == page
    assert {path.name: path.read_bytes() for path in (run_dir / "report").iterdir()} == before


def test_b91_rates_come_with_formula_peak_and_dtype(page):
    assert MFU_FORMULA in page
    flops = sum(training_flops(ModelConfig(num_layers=4, compute_dtype="float32"), 256).values())
    milliseconds = float(cell(page, "step time, median (p10, p90)", 1).split(" ")[0])
    expected = flops * 4096 / (milliseconds / 1e3) / 8 / 1e12
    assert float(cell(page, "model TFLOP/s per device", 1)) == pytest.approx(expected, rel=1e-3)
    assert float(cell(page, "MFU by active parameters", 1).rstrip("%")) / 100 == pytest.approx(
        expected / 0.0098, abs=1e-3
    )
    assert "float32 peak" in cell(page, "MFU by active parameters", 2)
    assert "best of 7 float32 GEMMs of 2048^3" in cell(page, "peak per device", 2)


def test_tables_of_size(page):
    counts = parameter_counts(ModelConfig(num_layers=4))
    assert cell(page, "**total**", 1) == f"{counts.total:,}"
    assert cell(page, "**active per token**", 1) == f"{counts.active:,}"
    assert "The run itself counted 1,000,000: the formula and the model differ" in page


def test_steps_with_a_compilation_are_left_out_of_the_step_time(page):
    low, high = (
        float(x.strip("(),").replace(",", ""))
        for x in cell(page, "step time, median (p10, p90)", 1).split()[2:]
    )
    assert 400 < low < high < 700
    assert "2 steps with a compilation or restart took 35.0 s together" in page


# Broken, stopped and unusual runs


def test_evaluations_of_unequal_size_are_not_compared(tmp_path, no_plots):
    """The last evaluation reads more bytes than those before: its point is from another sample."""
    path = fake_run(tmp_path / "run", steps=160, domains=("code",))
    text = (path / "metrics.jsonl").read_text()
    first, last = text.rsplit('"bytes_by_domain": {"code": 200000}', 1)
    small = first.replace('"code": 200000', '"code": 32768')
    (path / "metrics.jsonl").write_text(small + '"bytes_by_domain": {"code": 200000}' + last)
    page = write_report(path).read_text()
    assert "Between steps 100 and 150: code -" in page
    assert "The last point is of 200,000 held-out bytes, those before of 32,768." in page
    assert cell(page, "code", 2) == "200,000"


def test_lost_copies_are_shouted(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=60)

    def lose(record):
        if record["step"] == 7:
            record["ledger"]["combined"] -= 5
            record["ledger"]["dropped"] = 5

    edit_steps(path, lose)
    page = write_report(path).read_text()
    assert "**NOT dropless.** The books of step 7" in page
    assert "5 dropped" in page
    assert "**Dropless.**" not in page


def test_losses_that_cancel_in_the_totals_are_still_found(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=60)
    edit_steps(path, lambda r: r["ledger"].update(sent=r["ledger"]["made"] + {3: 4, 5: -4}.get(r["step"], 0)))
    page = write_report(path).read_text()
    assert Run.read(path).ledger["sent"] == Run.read(path).ledger["made"]
    assert "**NOT dropless.** The books of step 3" in page


def test_b91_twice_the_peak_is_half_the_utilisation(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=60)
    read = lambda: float(cell(write_report(path).read_text(), "MFU by active parameters", 1).rstrip("%"))  # noqa: E731
    before = read()
    edit(path, "summary.json", lambda s: s["peak"].update(tflops_per_device=2 * 0.0098, dtype="float8"))
    assert read() == pytest.approx(before / 2, abs=0.1)
    assert "(the matmuls are float32: not the same)" in (path / "report.md").read_text()


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 1, "domains": ("code",)},
        {"layers": 0, "dense": 2},
        pytest.param(
            {"layers": 12, "dense": 0, "experts": 64, "top_k": 6, "steps": 30}, marks=pytest.mark.slow
        ),
        {"layers": 1, "mtp": 1, "domains": ("protein", "dna"), "steps": 300},
        {"steps": 1},
        {"experts": 1, "top_k": 1},
    ],
    ids=["one layer and domain", "no experts", "wide and deep", "mtp", "one step", "one expert"],
)
def test_unusual_runs_are_drawn(tmp_path, shape):
    path = fake_run(tmp_path / "run", **{"steps": 60, **shape})
    page = write_report(path).read_text()
    drawn = {p.stem for p in (path / "report").iterdir()}
    routed = shape.get("layers", 3) + shape.get("mtp", 0)
    num_domains = len(shape.get("domains", DOMAINS))
    expected = {"loss": True, "speed": True, "load": routed > 0, "domains": routed > 0 and num_domains > 1}
    assert drawn == {name for name, is_drawn in expected.items() if is_drawn}
    assert ("None: the model has no MoE layer" in page) == (routed == 0)
    assert ("One domain: there is nothing" in page) == (num_domains == 1)
    assert ("4 of 12 layers are not drawn" in page) == (routed == 12)
    assert ("| MTP 1 |" in page) == ("mtp" in shape)
    assert "nan" not in page


def test_a_stopped_run_says_so(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=70, finished=False)
    page = write_report(path).read_text()
    assert "stopped at step 70 of 140" in page
    assert "an evaluation at the end (the run reached step 70, the last is of step 50)" in page


@pytest.mark.parametrize("absent", ["summary.json", "config.json", "metrics.jsonl", "all"])
def test_whole_files_missing(tmp_path, absent):
    path = fake_run(tmp_path / "run", steps=60)
    for name in ("summary.json", "config.json", "metrics.jsonl"):
        if absent in (name, "all"):
            (path / name).unlink()
    page = write_report(path).read_text()
    assert "**Missing here.**" in page
    assert ("no summary.json" in page) == (absent in ("summary.json", "all"))
    assert ("no config.json" in page) == (absent in ("config.json", "all"))
    assert ("every step (none in metrics.jsonl)" in page) == (absent in ("metrics.jsonl", "all"))
    assert "nan" not in page


SUMMARY_KEYS = ("baselines", "peak", "latency_ms", "sources", "versions", "machine", "devices", "seconds")
DRAWN_KEYS = ("seconds", "tokens", "targets", "load", "bits_per_byte_by_domain")
TOLD_KEYS = ("ledger", "demand", "capacity", "bias_range", "max_over_mean")


@pytest.mark.parametrize(
    "key", [*SUMMARY_KEYS, "parameters", "compilations", "tokens_seen", "preset", "name"]
)
def test_a_key_missing_from_the_summary(tmp_path, no_plots, key):
    path = fake_run(tmp_path / "run", steps=12, domains=("code",))
    edit(path, "summary.json", lambda summary: summary.pop(key))
    page = write_report(path).read_text()
    assert ("**Missing here.**" in page) == (key in SUMMARY_KEYS[:6])
    assert "nan" not in page


@pytest.mark.parametrize("key", DRAWN_KEYS)
def test_a_drawn_key_missing_from_every_step(tmp_path, key):
    path = fake_run(tmp_path / "run", steps=12, layers=1, domains=("code", "dna"))
    edit_steps(path, lambda record: record.pop(key))
    page = write_report(path).read_text()
    assert "nan" not in page
    assert page.count("![") == (3 if key in ("seconds", "load") else 4)


@pytest.mark.parametrize("key", TOLD_KEYS)
def test_a_told_key_missing_from_every_step(tmp_path, no_plots, key):
    path = fake_run(tmp_path / "run", steps=12, layers=1, domains=("code",))
    edit_steps(path, lambda record: record.pop(key))
    page = write_report(path).read_text()
    assert "nan" not in page
    assert ("**Token ledger.** None was recorded." in page) == (key == "ledger")
    assert ("The largest demand" in page) == (key not in ("demand", "capacity", "ledger"))


def test_torn_last_line(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=20)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    assert "20 steps" in write_report(path).read_text()


def test_plots_of_a_former_report_go(tmp_path, no_plots):
    path = fake_run(tmp_path / "run", steps=5)
    (path / "report").mkdir()
    (path / "report" / "old.png").touch()
    write_report(path)
    assert not list((path / "report").iterdir())


def test_no_such_run(tmp_path):
    with pytest.raises(SettingError, match="there is no run in"):
        write_report(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# Numbers


@pytest.mark.parametrize(
    ("bits", "ladder", "words"),
    [
        (2.6, [4.38, 3.35, 2.49], "beats order 1 (3.350), not order 2 (2.490)"),
        (2.49, [4.38, 3.35, 2.49], "beats order 1 (3.350), not order 2 (2.490)"),  # a tie is no win
        (5.0, [4.38, 3.35], "beats no n-gram, order 0 is 4.380"),
        (1.0, [4.38, 3.35], "beats every n-gram, the best is order 1 (3.350)"),
        (4.16, [4.182, 4.159, 4.149, 4.165, 4.337], "beats orders 0, 3, 4, not orders 1, 2"),
        (4.2, [4.182, 4.159, 4.337], "beats order 2, not orders 0, 1"),
        (4.2, [], "no n-gram baseline"),
    ],
)
def test_against_baselines(bits, ladder, words):
    assert against_baselines(bits, ladder) == words


def test_mutual_information_by_hand():
    assert mutual_information(np.array([[5.0, 5.0], [5.0, 5.0]])) == 0
    assert mutual_information(np.array([[8.0, 0.0], [0.0, 8.0]])) == 1
    # H(3/4) + H(1/2) - H(1/2, 1/4, 1/4): 0.8113 + 1 - 1.5
    assert mutual_information(np.array([[2.0, 1.0], [0.0, 1.0]])) == pytest.approx(0.31128, abs=1e-5)


counts = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=2, max_size=4)


@given(counts)
def test_mutual_information_properties(rows):
    table = np.array(rows, float)
    if table.sum() == 0:
        assert np.isnan(mutual_information(table))
        return
    bits, slack = mutual_information(table), 1e-12
    assert -slack <= bits <= min(entropy(table.sum(0)), entropy(table.sum(1))) + slack
    assert mutual_information(table.T) == pytest.approx(bits, abs=slack)
    assert mutual_information(7 * table) == pytest.approx(bits, abs=1e-9)
    # A twin that forgets the marginals is caught.
    joint = table[table > 0] / table.sum()
    twin = float(-(joint * np.log2(joint)).sum())
    assert twin >= bits - slack


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_labels_keep_their_order_and_distance(places):
    moved = figures.spread(sorted(places), 0.08)
    assert all(b - a > 0.079 for a, b in pairwise(moved))


@given(st.integers(1, 700), st.integers(1, 100))
def test_blocks_add_up(steps, columns):
    load = np.arange(steps * 2).reshape(steps, 1, 2)
    blocks = figures.block_sums(load, columns)
    assert len(blocks) == min(steps, columns)
    np.testing.assert_array_equal(blocks.sum(0), load.sum(0))


@given(st.lists(st.one_of(st.none(), st.floats(-9, 9)), max_size=30), st.integers(1, 40))
def test_running_mean_against_a_loop(values, window):
    values = np.array([np.nan if v is None else v for v in values], float)
    got = figures.running_mean(values, window)
    for i in range(len(values)):
        recent = values[max(0, i + 1 - window) : i + 1]
        recent = recent[np.isfinite(recent)]
        assert (np.isnan(got[i]) and not len(recent)) or got[i] == pytest.approx(recent.mean(), abs=1e-12)


def test_bytes_seen_count_only_what_was_predicted(run_dir):
    run = Run.read(run_dir)
    assert run.bytes_seen[-1] == 400 * (16 * 256 - 7)
    assert run.bytes_at(np.array([0.0, 1.0, 400.0])).tolist() == [0, 4089, 400 * 4089]
