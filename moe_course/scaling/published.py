"""Published training runs and communication benchmarks, row by row, with their sources. Imports no JAX.

The rows are ``data/published_runs.json``; ``data/README.md`` says what each field is.
"""

import functools
import json
from dataclasses import dataclass
from datetime import date
from importlib import resources

from moe_course.errors import SettingError
from moe_course.scaling.layout import Layout
from moe_course.scaling.shape import ModelShape, from_published


@dataclass(frozen=True)
class Run:
    """One published training run that has a speed, a model's sizes and a layout."""

    id: str
    source: str
    """The page, shortened: releases of one table are different pages."""
    publisher: str
    """Who wrote the software and measured: pages of one publisher are not independent."""
    lineage: str
    """Near-copies (the same model, machine, size and format over releases) share it."""
    year: float
    """When it was published, as 2026.5."""
    shape: ModelShape
    row: dict
    """The row as it is in the file."""

    @property
    def tokens_per_second(self) -> float:
        """Per GPU. Where a table rounds its tokens/s, its TFLOPS are the finer figure."""
        measured, flops = self.row["measured"], self.row["ref_gflop_per_token"]
        coarse = "coarse grid" in (self.row["notes"] or "")
        same_formula = (measured["flop_formula"] or "").startswith("mcore-causal") and abs(
            (measured["tflops_per_gpu"] or 0) / self.row["tflops_ref_formula"] - 1
        ) < 0.03
        if coarse and same_formula:
            return measured["tflops_per_gpu"] * 1e3 / flops
        return measured["tokens_per_s_per_gpu"]


@functools.cache
def rows() -> list[dict]:
    """All rows of the file."""
    path = resources.files("moe_course.scaling") / "data" / "published_runs.json"
    return json.loads(path.read_text("utf-8"))


@functools.cache
def training_runs() -> list[Run]:
    """Rows with tokens/s, sizes, layout and batch: those that a step-time model can be asked about."""
    return [_run(row) for row in rows() if _complete(row)]


def communication_rows() -> list[dict]:
    """Microbenchmarks of collectives and of dispatch and combine."""
    return [row for row in rows() if row["kind"] == "comm"]


@functools.cache
def shapes() -> dict[str, ModelShape]:
    """Every published model with known sizes, by lower-case name."""
    found = {}
    for row in rows():
        if row["kind"] != "comm":
            try:
                found.setdefault(row["model"]["name"].lower(), from_published(row["model"]))
            except SettingError:
                continue
    return found


PUBLISHERS = {
    "Megatron-Bridge": "megatron-bridge",
    "Megatron-MoE-ModelZoo": "megatron-modelzoo",
    "Optimizing DeepSeek-V3": "megatron-gb200-guide",
    "Scalable Training": "megatron-paper",
    "Megatron-LM examples": "megatron-lm",
    "NeMo AutoModel": "nemo-automodel",
    "torchtitan": "torchtitan",
    "MaxText": "maxtext",
    "JAX-Toolbox": "jax-toolbox",
    "DeepSeek-V3 Technical": "deepseek",
}


WITHOUT_GRAPHS = ("megatron-gb200-guide", "torchtitan", "nemo-automodel", "deepseek")
"""Where an unnamed CUDA graph is none: the guide adds them as a step; the others' pages do not know them. DeepSeek's
DualPipe (arXiv 2412.19437, section 3.2.1) overlaps dispatch, which its row does not say."""
DISPATCHERS = {
    "alltoall": "all_to_all",
    "hybridep": "hierarchical",
    "deepep": "deepep",
    "nccl-ep": "hierarchical",
}


def layout_of(run: Run) -> Layout:
    """The layout that a published row describes; what it leaves open stays unknown."""
    row, sizes = run.row, run.row["parallelism"]
    dispatcher = (row["dispatcher"] or "hybridep").split()[0]
    graphs = (row.get("cuda_graphs") or {}).get("impl")
    again = row["recompute"] or ()
    overlap = row["overlap"] or {}
    one = lambda key: sizes.get(key) or 1  # noqa: E731
    return Layout(
        gpus=row["hardware"]["gpus"],
        ep=one("ep"),
        tp=one("tp"),
        pp=one("pp"),
        vpp=one("vpp") if one("pp") > 1 else 1,
        cp=one("cp"),
        etp=one("etp"),
        fsdp=bool(sizes.get("fsdp")),
        seq_len=row["seq_len"],
        global_batch=row["global_batch"],
        micro_batch=row["micro_batch"] or 1,
        precision=row["precision"],
        recompute=tuple(again.split() if isinstance(again, str) else again),
        dispatcher=DISPATCHERS.get(dispatcher, "hierarchical"),
        overlap=True if run.publisher == "deepseek" else overlap.get("ep_a2a_1f1b"),
        graphs={"transformer_engine": "partial", "full_iteration": "full", "none": "none"}.get(
            graphs, "none" if run.publisher in WITHOUT_GRAPHS else None
        ),
        static_shapes=(row.get("drop") or "").startswith("token drop"),
        real_routing=(row.get("routing") or "").startswith("real"),
    )


def _complete(row: dict) -> bool:
    layout = row.get("parallelism") or {}
    return (
        row["kind"] != "comm"
        and bool(row["ref_gflop_per_token"] and row["measured"]["tokens_per_s_per_gpu"])
        and bool(row["global_batch"] and layout.get("tp") and row["hardware"]["gpus"])
    )


def _run(row: dict) -> Run:
    title = row["source"]["title"]
    publisher = next((name for words, name in PUBLISHERS.items() if words in title), "other")
    release = title.rpartition(", ")[2].removesuffix(" NeMo container") if "NeMo container" in title else ""
    kind = "card" if "verification card" in title else "guide" if "performance guide" in title else release
    source = f"{publisher} {kind}".strip() if publisher == "megatron-bridge" else publisher
    if publisher == "torchtitan":
        source = f"torchtitan {row['source']['date'][:7]}"
    return Run(
        row["id"], source, publisher, row["lineage"], _year(row["source"]["date"], title),
        from_published(row["model"]), row,
    )  # fmt: skip


def _year(text: str, title: str) -> float:
    if release := title.rpartition(", ")[2].partition(" NeMo container")[0]:
        parts = release.split(".")
        if len(parts) >= 2 and parts[0].isdigit() and len(parts[0]) == 2:
            return 2000 + int(parts[0]) + (int(parts[1]) - 0.5) / 12
    year, month, day = (*(int(n) for n in text.split("-")), 7, 1)[:3] if "-" in text else (int(text), 7, 1)
    return year + (date(year, month, min(day, 28)).timetuple().tm_yday - 1) / 365
