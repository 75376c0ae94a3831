# %% [markdown]
# # 02 Routing

# %%
from moe_course.environment import setup

status = setup()

# %%
import jax
import jax.numpy as jnp

from moe_course.lessons import check, plots, quiz

# %% [markdown]
# ## 02.1 Scores


# %%
def scores_of(logits, score_fn):
    """Scores of every expert for every token.

    logits [T, E], any floating dtype -> scores [T, E] float32
    """
    ### BEGIN SOLUTION
    logits = logits.astype(jnp.float32)
    return jax.nn.softmax(logits, axis=-1) if score_fn == "softmax" else jax.nn.sigmoid(logits)
    ### END SOLUTION


check("02.1", scores_of)

# %%
quiz(
    "02.q1",
    ### BEGIN ANSWER
    "b",
    ### END ANSWER
)

# %%
plots.show(plots.load_bars([3, 4, 9, 0]), "one expert is idle")
