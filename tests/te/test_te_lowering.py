"""What TE makes of our calls for Hopper (SM90) and Blackwell (SM100): kernels, operands, attributes. Lowered, not run.

One process per compute capability, as TE remembers the first that it is told.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORWARD = "te_fused_topk_with_score_function_forward_ffi"
BACKWARD = "te_fused_topk_with_score_function_backward_ffi"
V1, V2 = "te_grouped_gemm_ffi", "te_grouped_gemm_v2_ffi"


@pytest.fixture(scope="session")
def facts_at(load_te, tmp_path_factory):
    """``facts_at(90)``: the facts of all cases of ``lowered.py`` for that GPU, made once."""
    made = {}

    def make(capability):
        if capability not in made:
            out = tmp_path_factory.mktemp("lowered") / f"{capability}.json"
            clean = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "XLA_"))}
            done = subprocess.run(
                [sys.executable, "-m", "tests.te.lowered", str(capability), str(out)],
                cwd=ROOT,
                env=clean | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                capture_output=True,
                text=True,
                timeout=540,
                stdin=subprocess.DEVNULL,
            )
            made[capability] = json.loads(out.read_text()) if done.returncode == 0 else done.stderr[-4000:]
        assert isinstance(made[capability], dict), made[capability]
        return made[capability]

    return make


def calls(facts: dict, name: str) -> dict[str, list[dict]]:
    """Custom calls of a case by target."""
    found = facts[name]
    assert not found["error"], found["traceback"]
    by_target: dict[str, list[dict]] = {}
    for call in found["calls"]:
        by_target.setdefault(call["target"], []).append(call)
    return by_target


def count(facts: dict, name: str) -> dict[str, int]:
    """How many calls of each TE kernel."""
    return {target: len(c) for target, c in calls(facts, name).items() if target.startswith("te_")}


def attribute(call: dict, name: str) -> str:
    match = re.search(rf"\b{name} = ([^,}}]+)", call["attributes"])
    assert match, f"{name} is not among the attributes: {call['rest']}"
    return match[1].strip()


ARCHITECTURES = [90, 100]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", ARCHITECTURES)
class TestOnEveryGpu:
    def test_route(self, facts_at, capability):
        found = calls(facts_at(capability), "route")
        (forward,), (backward,) = found[FORWARD], found[BACKWARD]
        assert forward["operands"].startswith("tensor<1024x256xf32>, tensor<256xf32>"), (
            "float32 logits and bias"
        )
        want = {
            "topk": "8",
            "num_groups": "8",
            "group_topk": "4",
            "score_function": "0",
            "use_pre_softmax": "0",
        }
        for name, value in want.items():
            assert attribute(forward, name).startswith(value), name
        assert float(attribute(forward, "scaling_factor").split(" ")[0]) == 2.5
        assert "tensor<1024x256xi1>" in backward["operands"]
        mixtral = calls(facts_at(capability), "route_mixtral")[FORWARD][0]
        assert attribute(mixtral, "score_function").startswith("1")
        assert attribute(mixtral, "use_pre_softmax").startswith("0")
        assert mixtral["operands"].startswith("tensor<1024x8xf32>, tensor<0xf32>"), (
            "bf16 logits arrive in float32"
        )

    def test_balance(self, facts_at, capability):
        found = calls(facts_at(capability), "balance")
        (forward,) = found["te_fused_moe_aux_loss_forward_ffi"]
        assert forward["operands"] == "tensor<1024x256xf32>, tensor<256xi32>"
        assert attribute(forward, "topk").startswith("8")
        assert len(found["te_fused_moe_aux_loss_backward_ffi"]) == 1

    @pytest.mark.parametrize("name", ["permute", "permute_unpadded"])
    def test_permute(self, facts_at, capability, name):
        if os.environ.get("MOE_COURSE_TE") == "python" and find_spec("triton") is None:
            pytest.skip("Triton, in which TE wrote its permutation, is not installed")
        found = calls(facts_at(capability), name)
        kernels = sum(len(c) for target, c in found.items() if target.startswith("triton_kernel_call"))
        assert kernels >= 6, "three for the row map, one each for permute, unpermute and their derivatives"

    def test_grouped_gemm(self, facts_at, capability):
        assert count(facts_at(capability), "grouped_gemm") == {V2: 3}, (
            "sizes on the device, in all three products"
        )
        found = calls(facts_at(capability), "grouped_gemm")[V2]
        for call in found:
            assert "tensor<4xi32>" in call["operands"], "the sizes are an operand, int32"
            assert attribute(call, "scaling_mode").startswith("0")
        sides = {(attribute(c, "lhs_left_size"), attribute(c, "lhs_right_size")) for c in found}
        assert {tuple(side.split(" ")[0] for side in pair) for pair in sides} == {
            ("1024", "256"),
            ("1024", "128"),
        }

    def test_grouped_gemm_runs_inside_shard_map(self, facts_at, capability):
        assert count(facts_at(capability), "grouped_gemm_in_shard_map") == {V2: 3}

    def test_fp8_per_tensor_copies_the_sizes(self, facts_at, capability):
        found = count(facts_at(capability), "grouped_gemm_fp8_copied")
        assert found[V1] == 3
        assert V2 not in found

    def test_dense(self, facts_at, capability):
        assert count(facts_at(capability), "dense") == {"te_gemm_v2_ffi": 3}
        assert count(facts_at(capability), "dense_fp8")["te_gemm_v2_ffi"] == 3

    def test_layernorm_mlp(self, facts_at, capability):
        found = count(facts_at(capability), "layernorm_mlp")
        want = {"te_norm_forward_ffi": 1, "te_norm_backward_ffi": 1, "te_act_lu_ffi": 1}
        for target, number in want.items():
            assert found[target] == number, target
        assert found["te_gemm_v2_ffi"] == 6, "two products, each with dgrad and wgrad"

    def test_dispatch_and_combine(self, facts_at, capability):
        traced = facts_at(capability)["dispatch_and_combine"]
        assert not traced["error"], traced["traceback"]
        names = [name for name in traced["primitives"] if name.startswith("te_ep_")]
        for op in ("prepare", "dispatch", "combine"):
            assert any(name.startswith(f"te_ep_{op}_ffi") for name in names), op
        for op in ("dispatch", "combine"):
            assert any(name.startswith(f"te_ep_{op}_bwd") for name in names), f"the derivative of {op}"

    def test_moe(self, facts_at, capability):
        found = count(facts_at(capability), "moe")
        assert found[V2] == 6, "two products, each with dgrad and wgrad"
        assert V1 not in found
        traced = facts_at(capability)["moe"]["primitives"]
        assert any(name.startswith("te_ep_dispatch_ffi") for name in traced)

    def test_our_layer_under_expert_parallelism(self, facts_at, capability):
        """layers.MoE with backend="te" on a mesh of 2 x 4, our exchange around TE's grouped GEMM."""
        assert count(facts_at(capability), "our_layer") == {V2: 6}, "two products, each with dgrad and wgrad"

    def test_our_layer_with_te_s_exchange(self, facts_at, capability):
        found = facts_at(capability)["our_layer_and_te_dispatch"]
        assert count(facts_at(capability), "our_layer_and_te_dispatch")[V2] == 6
        for op in ("prepare", "dispatch", "combine", "dispatch_bwd", "combine_bwd"):
            assert any(name.startswith(f"te_ep_{op}") for name in found["primitives"]), op

    def test_the_policy_decides_whether_te_s_gemms_run_twice(self, facts_at, capability):
        sees, does_not = (
            count(facts_at(capability), f"remat_that_{what}")["te_gemm_v2_ffi"]
            for what in ("sees_te", "does_not")
        )
        assert sees == 6, "two products, each with dgrad and wgrad, and none again"
        assert does_not > sees, "JAX's policy does not see TE's GEMMs and recomputes them"


MXFP8_CASES = ["grouped_gemm_mxfp8", "dense_mxfp8", "layernorm_mlp_mxfp8", "moe_mxfp8_with_balance_loss"]


@pytest.mark.parametrize("name", MXFP8_CASES)
def test_hopper_refuses_mxfp8_instead_of_copying_sizes(facts_at, name):
    error = facts_at(90)[name]["error"]
    assert error.startswith("SettingError: the GPU is too old for TE's"), error
    assert "10.0 (Blackwell)" in error


class TestOnBlackwell:
    def test_grouped_gemm_mxfp8(self, facts_at):
        found = calls(facts_at(100), "grouped_gemm_mxfp8")
        assert count(facts_at(100), "grouped_gemm_mxfp8") == {V2: 3, "te_grouped_quantize_v2_ffi": 3}
        for call in found[V2]:
            assert "f8E4M3FN" in call["operands"]
            assert not attribute(call, "scaling_mode").startswith("0")
            assert "bf16" in call["results"]

    def test_dense_mxfp8(self, facts_at):
        found = count(facts_at(100), "dense_mxfp8")
        assert found["te_gemm_v2_ffi"] == 3
        assert found["te_dbias_quantize_ffi"] == 3

    def test_layernorm_mlp_mxfp8(self, facts_at):
        assert count(facts_at(100), "layernorm_mlp_mxfp8")["te_gemm_v2_ffi"] == 6

    def test_moe_mxfp8_with_balance_loss(self, facts_at):
        found = count(facts_at(100), "moe_mxfp8_with_balance_loss")
        assert found[V2] == 6
        assert found["te_grouped_quantize_v2_ffi"] == 6
        traced = facts_at(100)["moe_mxfp8_with_balance_loss"]["primitives"]
        assert any(name.startswith("te_fused_moe_aux_loss_forward") for name in traced)
