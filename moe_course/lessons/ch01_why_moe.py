"""Chapter 01, why MoE: the text of its exercises and questions. What they check: ``properties/ch01.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch01 as p

EXERCISES = (
    Exercise(
        id="01.1",
        title="one feed-forward",
        goal="Count the parameters and the forward FLOPs per token of a SwiGLU feed-forward.",
        difficulty=1,
        minutes=5,
        used_again=("05", "10"),
        hints=(
            "How many matrices does SwiGLU have? And for one token, how often is each entry of a matrix used?",
            "gate [D, F], up [D, F], down [F, D]. Two whole numbers come back.",
            "parameters = (number of matrices) * d_model * d_ff\nflops = (FLOPs per multiply-add) * parameters",
            """
def ffn_cost(d_model, d_ff):
    parameters = 3 * d_model * d_ff
    return parameters, 2 * parameters
""",
        ),
        properties=(p.ffn_parameters, p.ffn_flops),
    ),
    Exercise(
        id="01.2",
        title="total and active",
        goal="Count what a MoE layer stores and what one token uses of it.",
        difficulty=1,
        minutes=10,
        used_again=("06", "10", "11"),
        hints=(
            "Which parts does every token use, whatever the router decides? And can the router know which experts are "
            "the best without looking at all of them?",
            "An expert has 3 D F parameters; the router is one matrix [D, E].",
            "expert = ...; router = d_model * num_experts\ntotal = (num_experts + ...) * expert + router\n"
            "active = (top_k + ...) * expert + router",
            """
def moe_parameters(d_model, d_ff, num_experts, top_k, num_shared):
    expert, router = 3 * d_model * d_ff, d_model * num_experts
    return (num_experts + num_shared) * expert + router, (top_k + num_shared) * expert + router
""",
        ),
        properties=(p.layer_total, p.layer_active),
    ),
    Exercise(
        id="01.3",
        title="a training step",
        goal="Count the FLOPs of one training step, per token.",
        difficulty=2,
        minutes=10,
        used_again=("10", "12"),
        hints=(
            "For each matrix the backward pass multiplies twice: once for the gradient of its input, once for that of its "
            "entries. How many forwards is a step? And which work belongs to no parameter at all?",
            "Per token: 2 FLOPs a parameter and forward. Scores: seq_len keys of qk_dim for each head; values: the same "
            "with v_dim; a causal token sees half of them on average.",
            "forward = 2 * matmul_parameters + num_layers * num_heads * (2 * seq_len / 2) * (...)\nreturn 3 * forward",
            """
def training_step_flops(matmul_parameters, seq_len, num_layers, num_heads, qk_dim, v_dim):
    attention = num_layers * num_heads * seq_len * (qk_dim + v_dim)
    return 3 * (2 * matmul_parameters + attention)
""",
        ),
        properties=(p.step_flops,),
    ),
    Exercise(
        id="01.4",
        title="the compute wall",
        goal="Find the batch at which an expert's arithmetic takes as long as reading its weights.",
        difficulty=3,
        minutes=10,
        used_again=("05", "10"),
        hints=(
            "A weight is read once per batch and used once per row. Which of the two, reading or computing, grows with "
            "the number of rows?",
            "Time to read a weight: bytes_per_weight / bytes_per_second. Time to use it: 2 * rows / flops_per_second.",
            "rows = flops_per_second * bytes_per_weight / (2 * bytes_per_second)\nrows = tokens * top_k / num_experts",
            """
def tokens_to_fill(num_experts, top_k, flops_per_second, bytes_per_second, bytes_per_weight):
    rows = flops_per_second * bytes_per_weight / (2 * bytes_per_second)
    return rows * num_experts / top_k
""",
        ),
        properties=(p.fill,),
    ),
    Exercise(
        id="01.5",
        title="a loop over experts",
        goal="Turn a dense SwiGLU feed-forward into a MoE layer, with a loop.",
        difficulty=2,
        minutes=15,
        used_again=("04", "05", "06"),
        hints=(
            "For one expert and one token: what should the expert's answer be multiplied by if the token picked it, and "
            "what if it did not?",
            "x [T, D] -> gate and up [T, F] each -> answers of expert e [T, D]; its weight for each token [T, 1].",
            "for e in range(len(gate_up)):\n    gate, up = jnp.split(x @ gate_up[e], 2, axis=-1)\n"
            "    weight = jnp.where(ids == e, weights, 0.0).sum(...)\n    y = y + weight * (silu(gate) * up) @ down[e]",
            """
def naive_moe(x, ids, weights, gate_up, down):
    y = jnp.zeros_like(x)
    for e in range(len(gate_up)):
        gate, up = jnp.split(x @ gate_up[e], 2, axis=-1)
        weight = jnp.where(ids == e, weights, 0.0).sum(axis=-1, keepdims=True)
        y = y + weight * ((jax.nn.silu(gate) * up) @ down[e])
    return y
""",
        ),
        properties=(p.random_layers, p.one_expert, p.padded_layer, p.layer_under_jit, p.layer_gradients),
    ),
)

QUIZZES = (
    Quiz(
        "01.q1",
        "b",
        {
            "a": "Only the feed-forward is there eight times. Attention, embedding and norms exist once.",
            "b": "47 billion: eight feed-forwards in each layer, one attention. 13 billion are used by a token.",
            "c": "13 billion is what one token uses.",
        },
    ),
    Quiz(
        "01.q2",
        "c",
        {
            "a": "All 671 billion must be stored and updated, because the next token may pick any expert.",
            "b": "The gradient of an expert that got no token is 0, but its weights and moments are still there.",
            "c": "Compute follows the active parameters, memory the total ones. That gap is the bargain, and the first "
            "wall.",
        },
    ),
    Quiz(
        "01.q3",
        "a",
        {
            "a": "The loop needs each expert's rows, and how many there are depends on the data. XLA wants to know before "
            "it compiles. Chapter 04 makes the rows static and the sizes data.",
            "b": "It would, if the sizes were known when the program is compiled.",
            "c": "Python loops are unrolled into the program; that costs compile time, not run time.",
        },
    ),
    Quiz(
        "01.q4",
        "b",
        {
            "a": "The hardware did what it did. Only the count of useful work was wrong.",
            "b": "FLOPs were counted with total parameters: 2.83e11 per token instead of 7.97e10, 3.55 times too many. "
            "Utilisation counts work the model needs.",
            "c": "Attention is a small part at this length; it cannot explain a factor of 3.6.",
        },
    ),
)
