"""How one training run is laid out over GPUs: what a plan decides. No JAX."""

from dataclasses import dataclass

from moe_course.errors import SettingError
from moe_course.scaling.shape import ModelShape


@dataclass(frozen=True)
class Layout:
    """Parallel sizes, batch, number format and the choices that a step's time and memory follow from."""

    gpus: int
    ep: int = 1
    """GPUs that share the experts of a layer."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks per pipeline stage (interleaving)."""
    cp: int = 1
    etp: int = 1
    fsdp: bool = False
    """Weights sharded over data-parallel GPUs and gathered for use, instead of ZeRO-1."""
    seq_len: int = 4096
    global_batch: int = 1024
    """Sequences per optimizer step."""
    micro_batch: int = 1
    precision: str = "mxfp8"
    recompute: tuple[str, ...] = ()
    """``full``, or parts that are computed again: mlp, moe, moe_act, layernorm, core_attn, mla_up_proj."""
    dispatcher: str = "dedup"
    overlap: bool | None = None
    """Dispatch of one micro-batch beside compute of another. None: unknown (published rows)."""
    graphs: str | None = None
    """CUDA graphs: ``none``, ``partial``, ``full``. None: unknown."""
    static_shapes: bool = False
    """Capacity-limited with dropping: sizes never come from the device."""
    real_routing: bool = False
    """A learned router's imbalance, not forced balance."""
    skew: float | None = None
    """Rows of the busiest expert-parallel rank over the mean (:func:`comm.busiest_rank`); it sets the pace. None: what
    the published pairs of learned router and forced balance say."""
    capacity_factor: float | None = 1.0
    """Receive rows over the balanced need; None: the worst case, every copy that may come."""

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Copies of each expert (parallel folding: EP cuts across DP, CP and TP, inside a stage)."""
        return self.gpus // (self.pp * self.ep * self.etp)

    @property
    def micro_batches(self) -> float:
        """Per step and pipeline."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens of a step over GPUs, whichever way they are cut."""
        return self.global_batch * self.seq_len / self.gpus

    @property
    def micro_tokens(self) -> float:
        """Tokens that one GPU holds of one micro-batch."""
        return self.micro_batch * self.seq_len / (self.cp * self.tp)

    def describe(self) -> str:
        """In the field's words: ``EP64 PP4 VPP4, DP64, micro-batch 1``."""
        names = {"EP": self.ep, "TP": self.tp, "PP": self.pp, "VPP": self.vpp, "CP": self.cp, "ETP": self.etp}
        parts = [f"{name}{size}" for name, size in names.items() if size > 1]
        kind = "FSDP" if self.fsdp else "DP"
        return f"{' '.join(parts) or 'one GPU each'}, {kind}{self.dp}, micro-batch {self.micro_batch}"

    def problem(self, shape: ModelShape) -> str:
        """Why this layout is impossible for this model, in words; empty if it is legal."""
        if self.gpus % (self.tp * self.pp * self.cp):
            return f"TP {self.tp} x PP {self.pp} x CP {self.cp} does not divide {self.gpus} GPUs"
        if self.gpus % (self.pp * self.ep * self.etp):
            return f"PP {self.pp} x EP {self.ep} x ETP {self.etp} does not divide {self.gpus} GPUs"
        if self.ep > 1 and shape.experts % self.ep:
            return f"{shape.experts} experts do not divide over EP {self.ep}"
        if shape.heads % self.tp:
            return f"{shape.heads} heads do not divide over TP {self.tp}"
        if self.pp * self.vpp > shape.layers + 3:  # embedding, head and MTP may be stages too
            return f"{shape.layers} layers do not fill PP {self.pp} x VPP {self.vpp} chunks"
        if self.vpp > 1 and self.pp == 1:
            return "interleaving (VPP) needs PP"
        if self.global_batch % (self.dp * self.micro_batch):
            return f"global batch {self.global_batch} is not a multiple of DP {self.dp} x micro-batch {self.micro_batch}"
        if self.seq_len % (self.cp * self.tp):
            return f"sequence {self.seq_len} does not divide over CP {self.cp} x TP {self.tp}"
        if self.micro_batches < self.pp:
            return f"{self.micro_batches:g} micro-batches do not fill {self.pp} pipeline stages"
        if self.vpp > 1 and self.micro_batches % self.pp:
            return f"{self.micro_batches:g} micro-batches do not interleave in groups of {self.pp} stages"
        return ""

    def check(self, shape: ModelShape) -> None:
        """Raise :class:`SettingError` if the layout is impossible."""
        if problem := self.problem(shape):
            raise SettingError(f"{problem}. Change --gpus, --batch or the parallel sizes.")
