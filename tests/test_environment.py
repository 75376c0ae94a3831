"""setup() in fresh processes: JAX starts once per process, so each case needs its own."""

import os
import platform
import subprocess
import sys
import textwrap

import pytest

from moe_course import environment
from moe_course.errors import SettingError


def run(
    code: str, *, timeout: float = 120, path: str | None = None, **env: str
) -> subprocess.CompletedProcess:
    """Run code in a new Python, on the CPU, that knows nothing of this test session's JAX settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_")) and k != "NPROC"}
    clean |= {"JAX_PLATFORMS": "cpu"} | env | ({"PATH": path} if path is not None else {})
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean,
        stdin=subprocess.DEVNULL,
    )


def output(code: str, **kwargs) -> str:
    done = run(code, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_devices_and_four_status_lines(devices):
    printed = output(f"""
        import sys
        from moe_course.environment import backends_started, setup
        assert "jax" not in sys.modules, "the module imports JAX"
        assert not backends_started()
        status = setup({devices})
        assert backends_started()
        assert len(status.devices) == status.num_devices == {devices}
        assert status.simulated and status.platform == "cpu" and status.memory_bytes > 2**28
    """)
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["devices", "threads", "memory", "versions"]
    assert f"{devices} simulated CPU device" in lines[0]
    assert len(lines) == 4, "something to complain about on a healthy machine"


def test_quiet_prints_nothing_and_again_is_the_same():
    printed = output("""
        from moe_course.environment import setup
        assert setup(4, quiet=True) == setup(4, quiet=True)
    """)
    assert printed == ""


@pytest.mark.parametrize(
    "start",
    ["import jax; jax.devices()", "from moe_course.environment import setup; setup(2, quiet=True)"],
    ids=["jax-first", "setup-first"],
)
def test_refuses_another_count_once_started(start):
    printed = output(f"""
        {start}
        import jax
        from moe_course.environment import setup
        from moe_course.errors import RunError
        before = len(jax.devices())
        try:
            setup(5)
        except RunError as error:
            print(error)
        assert len(jax.devices()) == before
        setup(before, quiet=True)
    """)
    assert "before setup()" in printed
    assert "5 devices were asked for" in printed
    assert "Restart" in printed
    assert len(printed.splitlines()) == 1


def test_jax_imported_but_not_started_is_fine():
    output("""
        import os
        import jax, jax.numpy as jnp
        from moe_course.environment import backends_started, setup
        assert not backends_started()
        assert setup(6, quiet=True).notes == ()
        assert len(jax.devices()) == 6 and os.environ["NPROC"] >= "16"
    """)


def test_the_thread_pool_gets_its_size_even_after_import():
    """The cure has to reach the pool, not only the environment: more NPROC, more threads in the process."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads through /proc")
    count = """
        import os
        import jax
        from moe_course.environment import setup
        assert setup(8, quiet=True, platform="cpu").threads == int(os.environ["NPROC"])
        print(len(os.listdir("/proc/self/task")))
    """
    import_then_set = count.replace("import jax\n", "import jax; os.environ['NPROC'] = '48'\n")
    assert int(output(import_then_set)) - int(output(count)) >= 48 - max(16, environment.cpu_cores())


def test_unblocked_collectives_finish():
    """Without setup(), JAX 0.10.2 on two cores hangs in about every second run of this loop."""
    printed = output(
        """
        from moe_course.environment import setup
        setup(8, quiet=True, platform="cpu")
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

        def step(a, w):
            for _ in range(4):
                a = jax.lax.all_to_all(a.reshape(8, -1, a.shape[-1]), "x", 0, 0).reshape(a.shape)
                a = jnp.tanh(a @ w)
            return a, jax.lax.psum(a.sum(), "x")

        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P())))
        a = jax.device_put(jnp.ones((8 * 128, 128)), NamedSharding(mesh, P("x")))
        w = jnp.ones((128, 128)) / 128
        for _ in range(200):
            a, total = step(a, w)
        print(jax.block_until_ready(total).shape)
        """,
        timeout=100,
    )
    assert printed == "()\n"


def test_a_pool_too_small_is_told_on_old_jax_only():
    printed = output(
        """
        import jax
        from moe_course.environment import setup
        status = setup(8, platform="cpu")
        print("OLD" if jax.__version_info__ < (0, 11) else "NEW")
        """,
        NPROC="8",
    )
    assert ("can deadlock" in printed) == ("OLD" in printed)
    assert "NPROC=16" in printed or "NEW" in printed


def test_gpu_asked_for_where_there_is_none_then_cpu():
    if environment.visible_gpus():
        pytest.skip("this machine has a GPU")
    printed = output("""
        from moe_course.environment import setup
        from moe_course.errors import RunError
        try:
            setup(2, platform="gpu")
        except RunError as error:
            print(error)
        setup(2, platform="cpu", quiet=True)
    """)
    assert "No NVIDIA GPU is visible" in printed
    assert len(printed.splitlines()) == 1


def fake_smi(folder, script: str) -> str:
    """A PATH with an nvidia-smi of our own."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


SMI = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'"


def test_gpu_here_but_jax_is_cpu_only(tmp_path, monkeypatch):
    path = fake_smi(tmp_path, SMI)
    monkeypatch.setenv("PATH", path)
    assert environment.visible_gpus() == ["NVIDIA H200", "NVIDIA H200"]
    if environment._is_installed("jax-cuda13-plugin") or environment._is_installed("jax-cuda12-plugin"):
        pytest.skip("this environment has JAX's CUDA plugin")
    printed = output("from moe_course.environment import setup; setup(2)", path=path, JAX_PLATFORMS="")
    assert "CPU-only" in printed
    assert ".[gpu]" in printed
    # Whoever asks for the CPU knows.
    assert "CPU-only" not in output(
        "from moe_course.environment import setup; setup(2, platform='cpu')", path=path
    )


def test_gpu_plugin_here_but_the_driver_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_smi(tmp_path, SMI))
    monkeypatch.setattr(environment, "_is_installed", lambda package: package == "jax-cuda13-plugin")
    assert "jax-cuda13-plugin is installed, but JAX did not get it" in environment._gpu_fix()


@pytest.mark.parametrize(
    "script", ["exit 9", "echo 'NVIDIA-SMI has failed'", "echo 'No devices found'; kill -9 $$"]
)
def test_a_broken_nvidia_smi_never_breaks_setup(tmp_path, monkeypatch, script):
    monkeypatch.setattr(environment.glob, "glob", lambda pattern: [])
    monkeypatch.setenv("PATH", fake_smi(tmp_path, script))
    assert environment.visible_gpus() == []


@pytest.mark.parametrize("devices", [0, -1, 2.0, True, "8", 10**6, None])
def test_impossible_device_counts(devices):
    with pytest.raises(SettingError, match="--devices"):
        environment.setup(devices)


def test_impossible_platform():
    with pytest.raises(SettingError, match="'cpu', 'gpu'"):
        environment.setup(8, platform="cuda")


def test_versions_without_importing_packages():
    printed = output("""
        import sys
        from moe_course.environment import versions
        found = versions()
        assert not {"jax", "numpy", "flax"} & set(sys.modules)
        print(*found)
    """)
    assert printed == "python jax jaxlib flax numpy grain orbax platform cpu cores\n"


def test_memory_obeys_a_container_limit(monkeypatch):
    monkeypatch.setattr(environment, "_read", lambda path: "1048576\n")
    assert environment.memory_bytes() == 2**20
    monkeypatch.setattr(environment, "_read", lambda path: "max\n")
    assert environment.memory_bytes() > 2**20


def test_this_session_counts_as_started():
    """In this process conftest has set 8 devices: setup() agrees with 8 and refuses 4."""
    assert environment.setup(8, quiet=True).num_devices == 8
    with pytest.raises(environment.RunError, match="4 devices were asked for"):
        environment.setup(4, quiet=True)


def test_freed_memory_is_kept_where_the_allocator_allows():
    """On glibc the call is accepted; elsewhere it says so and changes nothing."""
    glibc = platform.libc_ver()[0] == "glibc"
    said = output("from moe_course.environment import keep_freed_memory; print(keep_freed_memory())")
    assert said.strip() == str(glibc)
