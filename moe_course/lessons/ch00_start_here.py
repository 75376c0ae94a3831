"""Chapter 00, start here: the text of its exercises and questions. What they check: ``properties/ch00.py``."""

from moe_course.lessons.exercise import Exercise, Quiz
from moe_course.lessons.properties import ch00 as p

EXERCISES = (
    Exercise(
        id="00.1",
        title="shares",
        goal="Turn copies per expert into shares, to see how a check talks.",
        difficulty=1,
        minutes=5,
        used_again=("03",),
        hints=(
            "What do the shares of all experts add up to? And what should they be if there is nothing to share?",
            "load [E] integer -> [E] float32. The sum is a scalar.",
            "return load / jnp.maximum(load.sum(), ...)",
            """
def shares(load):
    return load / jnp.maximum(load.sum(), 1)
""",
        ),
        properties=(p.some_loads, p.no_copies),
    ),
    Exercise(
        id="00.2",
        title="audit",
        goal="Read the token ledger: how many copies were dropped in each step, and where the books first differ.",
        difficulty=2,
        minutes=10,
        used_again=("07", "12"),
        hints=(
            "If a stage loses three copies and a later one counts three twice, is anything dropped? Would you still sign "
            "the books?",
            "ledger [S, 5] -> dropped [S] and where [S], integers. Neighbouring columns: [S, 4] comparisons.",
            "changed = ledger[:, 1:] != ledger[:, :-1]\nfirst = jnp.argmax(changed, axis=1)   # 0 also if nothing changed\n"
            "where = jnp.where(changed.any(axis=1), ..., 0)",
            """
def audit(ledger):
    changed = ledger[:, 1:] != ledger[:, :-1]
    where = jnp.where(changed.any(axis=1), jnp.argmax(changed, axis=1) + 1, 0)
    return ledger[:, 0] - ledger[:, -1], where
""",
        ),
        properties=(
            p.balanced_books,
            p.one_loss,
            p.several_losses,
            p.lost_and_found,
            p.few_steps,
            p.audit_under_jit,
        ),
    ),
)

QUIZZES = (
    Quiz(
        "00.q1",
        "b",
        {
            "a": "They share two or eight cores. A step on 8 simulated devices is slower than on one.",
            "b": "Who holds what, who sends what to whom, whether the numbers are right: all of it is as on real devices. "
            "How long it takes is not.",
            "c": "All shards live in the memory of this one machine.",
        },
    ),
    Quiz(
        "00.q2",
        "c",
        {
            "a": "It did not drop today. Tomorrow's batch may ask for more.",
            "b": "A falling loss is compatible with dropping: chapter 03 measures how much it costs.",
            "c": "Counted where each thing happens, by different parts of the code, and equal at every step. That is what "
            "dropless means in this course.",
        },
    ),
    Quiz(
        "00.q3",
        3,
        {
            3: "The rows were made, sent and received; the slice before the matrix product cut them off.",
            4: "Combined equals computed: what was cut off was never computed.",
            0: "Made is what everything is compared with.",
        },
        otherwise="Stages: 0 made, 1 sent, 2 received, 3 computed, 4 combined. Which is the first that differs?",
    ),
)
