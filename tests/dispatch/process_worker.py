"""One of two processes with four devices each: the dispatcher tests' core set, then a loop until somebody is killed.

``python -m tests.dispatch.process_worker COORDINATOR INDEX watch|blind check|loop``
"""

import os
import sys

os.environ.setdefault("NPROC", "16")

import jax


def main(coordinator: str, index: str, watch: str, what: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from moe_course.processes import join

    with join(coordinator, 2, int(index), lost_after=60, watch=watch == "watch"):
        from tests.dispatch.dispatch_cases import EXCHANGES, compiled, plan_for, probe_for, routing_case
        from tests.dispatch.test_dispatchers import check_case

        assert (len(jax.devices()), len(jax.local_devices())) == (8, 4)
        shape = (1, 1, 8)  # with two nodes, a node is a process
        for dispatcher in EXCHANGES if what == "check" else []:
            for case in ("random", "masked", "a rank with no tokens"):
                check_case(shape, dispatcher, case)
            print("checked", dispatcher, flush=True)
        if what == "check":
            check_case((2, 1, 4), "all_to_all", "masked")  # processes as replicas
            return
        x, ids, weights = routing_case("random", ranks=8)
        step = compiled(shape, plan_for(shape, "all_to_all"), False)
        while True:
            step(x, ids, weights, probe_for(x))
            print("stepped", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
