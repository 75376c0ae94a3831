"""The DeepSeek-style language model, and its loss in bits.

Architecture of DeepSeek-V3 (arXiv 2412.19437): MLA attention, ``num_dense_layers`` dense layers, then MoE
layers, optional multi-token prediction. Documents are packed: neither attention nor a target crosses a
segment border.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from moe_course.dispatch import DispatchPlan
from moe_course.experts import RESIDUAL_NAMES
from moe_course.layers.attention import MLA, Yarn
from moe_course.layers.block import ATTENTION_OUT, MTP, Block
from moe_course.layers.linear import Embedding, Linear, RMSNorm, SwiGLU
from moe_course.layers.moe import ExpertBias, MoE, MoEStats
from moe_course.layers.stack import apply_layers, layer_at, recompute, stack_layers
from moe_course.models.config import SCAN_FROM, ModelConfig
from moe_course.parallel import keep_tokens_sharded
from moe_course.quant.recipes import Recipe
from moe_course.routing import RouterConfig

REMAT = {
    "none": None,
    "full": (),
    "attention": (ATTENTION_OUT,),
    "experts": (ATTENTION_OUT, *RESIDUAL_NAMES),
    "offload": (),
}
"""What the backward pass finds kept of each layer besides its input, by name; None: all that it needs."""
ON_HOST = {"offload": (ATTENTION_OUT,)}
"""What of that waits in the host's memory."""

LATENT_NORM_EPS = 1e-6
"""Of the two norms inside MLA: DeepSeek's programs fix it, whatever the other norms use."""


def router_config(config: ModelConfig) -> RouterConfig:
    """The routing part of a model's settings."""
    names = "num_experts top_k score_fn normalize scaling_factor num_groups top_groups group_score_top"
    return RouterConfig(**{name: getattr(config, name) for name in names.split()})


def yarn(config: ModelConfig) -> Yarn | None:
    """The context extension of a model's settings, if there is one."""
    if config.rope_factor == 1:
        return None
    names = "factor original_length beta_fast beta_slow mscale mscale_all_dim"
    return Yarn(**{name: getattr(config, f"rope_{name}") for name in names.split()})


@partial(
    jax.tree_util.register_dataclass, data_fields=["logits", "mtp_logits", "moe", "finite"], meta_fields=[]
)
@dataclass(frozen=True)
class ModelOutput:
    logits: Float[Array, "batch seq vocab"]
    """Position i predicts token i + 1."""
    mtp_logits: tuple[Float[Array, "batch seq vocab"], ...]
    """Entry d: position i predicts token i + 2 + d."""
    moe: MoEStats | None
    """Stacked over MoE layers, those of the MTP modules last; None without any."""
    finite: Bool[Array, "layers"]
    """Whether each layer's output (MTP modules last) holds neither NaN nor infinity."""


class DeepSeekLM(nnx.Module):
    """Token ids in, logits out. See :class:`ModelConfig` for the sizes.

    Layers of a kind are stacked (``moe_course.layers.stack``): ``layers["dense"]`` and ``layers["moe"]``, each
    where the model has such layers. :meth:`layer` is one of them.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        init = {"std": c.init_std, "dtype": c.compute_dtype, "rngs": rngs}
        self.embedding = Embedding(c.vocab_size, c.d_model, **init)
        self.layers = nnx.Dict(
            {
                kind: stack_layers(partial(_block, c, kind == "moe"), number, rngs)
                for kind, number in _kinds(c)
            }
        )
        self.norm = RMSNorm(c.d_model, eps=c.norm_eps, dtype=c.compute_dtype)
        self.head = Linear(c.d_model, c.vocab_size, **init)
        self.mtp = nnx.List(
            [MTP(_block(c, True, rngs), c.d_model, eps=c.norm_eps, **init) for _ in range(c.mtp_depth)]
        )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        segments: Int[Array, "batch seq"],
        *,
        plan: DispatchPlan | None = None,
        backend: str = "auto",
        recipe: Recipe | None = None,
        key: Key[Array, ""] | None = None,
        remat: str = "none",
        scan_from: int = SCAN_FROM,
    ) -> ModelOutput:
        """``backend`` and ``recipe`` are those of the experts' grouped GEMMs, ``key`` what a recipe that rounds
        stochastically needs: a new one each step. ``remat`` names an entry of :data:`REMAT`. ``scan_from``
        layers of a kind, or more, are one loop in the program, which is the same but for rounding."""

        def apply(module, hidden, index, *more):
            layer_key = None if key is None else jax.random.fold_in(key, index)
            how = {"backend": backend, "recipe": recipe, "key": layer_key}
            hidden, stats = module(hidden, *more, segments, plan, **how)
            return hidden, (stats, jnp.isfinite(hidden).all())

        apply = recompute(apply, REMAT[remat], ON_HOST.get(remat, ()))
        hidden = keep_tokens_sharded(self.embedding(tokens.reshape(-1)))
        told, index = [], 0
        for kind, number in _kinds(self.config):
            indices = jnp.arange(index, index + number)
            hidden, of_kind = apply_layers(
                apply, self.layers[kind], hidden, indices, scan=number >= scan_from
            )
            told.append(of_kind)
            index += number
        hidden = self.norm(hidden)
        logits = self._logits(hidden, tokens.shape)

        mtp_logits = []
        for depth, module in enumerate(self.mtp):
            later = jnp.roll(tokens, -(depth + 1), axis=1)  # wraps; shifted_targets masks those positions
            embedded = self.embedding(later.reshape(-1))
            hidden, of_one = apply(module, hidden, index + depth, embedded)
            told.append(jax.tree.map(lambda leaf: leaf[None], of_one))
            mtp_logits.append(self._logits(hidden, tokens.shape))

        routed = [stats for stats, _ in told if stats is not None]
        return ModelOutput(
            logits=logits,
            mtp_logits=tuple(mtp_logits),
            moe=jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *routed) if routed else None,
            finite=jnp.concatenate([finite for _, finite in told]),
        )

    def first_moe_input(
        self, tokens: Int[Array, "batch seq"], segments: Int[Array, "batch seq"]
    ) -> Float[Array, "tokens d_model"]:
        """What the first MoE layer's router and experts see. For measuring that layer on real routing."""
        hidden = keep_tokens_sharded(self.embedding(tokens.reshape(-1)))
        for index in range(self.config.num_dense_layers):
            hidden, _ = self.layer(index)(hidden, segments, None)
        return self.layer(self.config.num_dense_layers).before_feed_forward(hidden, segments)[1]

    def layer(self, index: int) -> Block:
        """One layer, counted from the first dense one."""
        for kind, number in _kinds(self.config):
            if index < number:
                return layer_at(self.layers[kind], index)
            index -= number
        raise ValueError(f"the model has {self.config.num_layers} layers")

    def _logits(self, hidden, shape) -> Float[Array, "batch seq vocab"]:
        return self.head(hidden).astype(jnp.float32).reshape(*shape, -1)


def _kinds(c: ModelConfig) -> list[tuple[str, int]]:
    """(kind, number of its layers) in the order of the layers, without kinds that the model lacks."""
    return [(k, n) for k, n in (("dense", c.num_dense_layers), ("moe", c.num_moe_layers)) if n]


def _block(c: ModelConfig, is_moe: bool, rngs: nnx.Rngs) -> Block:
    down_std = c.init_std / (2 * c.num_layers) ** 0.5 if c.scaled_init else c.init_std
    attention = MLA(
        c.d_model,
        num_heads=c.num_heads,
        q_lora_rank=c.q_lora_rank,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        rope_theta=c.rope_theta,
        norm_eps=LATENT_NORM_EPS,
        std=c.init_std,
        out_std=down_std,
        dtype=c.compute_dtype,
        rngs=rngs,
        yarn=yarn(c),
    )
    init = {"std": c.init_std, "down_std": down_std, "dtype": c.compute_dtype, "rngs": rngs}
    if is_moe:
        shared = c.num_shared_experts
        feed_forward = MoE(c.d_model, c.d_ff, router_config(c), num_shared_experts=shared, **init)
    else:
        feed_forward = SwiGLU(c.d_model, c.d_ff_dense, **init)
    return Block(attention, feed_forward, c.d_model, eps=c.norm_eps, dtype=c.compute_dtype)


def shifted_targets(
    tokens: Int[Array, "batch seq_plus_1"], segments: Int[Array, "batch seq_plus_1"], shift: int
) -> tuple[Int[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Target of every input position ``shift`` tokens ahead, and whether it is one.

    A target counts only if it lies in the window and in the same document as its input (so the token that
    opens a document is never a target). ``shift`` 1 is next-token prediction.
    """
    seq = tokens.shape[1] - 1
    targets = jnp.roll(tokens, -shift, axis=1)[:, :seq]
    same_document = jnp.roll(segments, -shift, axis=1)[:, :seq] == segments[:, :seq]
    in_window = jnp.arange(seq) + shift <= seq
    return targets, same_document & in_window[None, :]


def token_losses(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Cross-entropy of each target, nats, float32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def split(model: DeepSeekLM):
    """(graph definition, parameters, expert biases): the last two as nested dicts of arrays."""
    graph, params, bias = nnx.split(model, nnx.Param, ExpertBias)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(bias)


def merger(config: ModelConfig):
    """A function (parameters, biases) -> model, for use inside jit. Allocates nothing."""
    abstract = nnx.eval_shape(lambda: DeepSeekLM(config, rngs=nnx.Rngs(params=0)))
    graph, params, bias = nnx.split(abstract, nnx.Param, ExpertBias)

    def merge(param_values, bias_values) -> DeepSeekLM:
        states = []
        for template, values in ((params, param_values), (bias, bias_values)):
            state = jax.tree.map(lambda leaf: leaf, template)
            nnx.replace_by_pure_dict(state, values)
            states.append(state)
        return nnx.merge(graph, *states)

    return merge
