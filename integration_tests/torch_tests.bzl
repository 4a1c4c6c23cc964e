"""Tests of the operators for PyTorch: in ranks that mpirun starts, and some in one process. Used by BUILD."""

load("@sys//:config.bzl", "TORCH_ROOT")
load("//bazel:mpi.bzl", "mpi_test")

def torch_tests():
    """Declares the tests of torch_ops_ranks.py, of an example, of lse, and of the Python in a clone."""

    # Attention that also returns lse.
    native.sh_test(
        name = "torch_lse_test",
        size = "medium",
        srcs = ["torch_lse_test.py"],
        args = [TORCH_ROOT],
        data = [":torch_python"],
        tags = ["numeric"],
    )

    # The Python of a clone, with stubs in place of NVIDIA's libraries.
    native.sh_test(
        name = "clone_python_test",
        size = "medium",
        srcs = ["clone_python_test.py"],
        args = [
            "$(rootpath //tools:cuda_stubs.py)",
            TORCH_ROOT,
        ],
        data = [
            ":torch_python",
            "//tools:cuda_stubs.py",
        ],
    )

    native.sh_binary(
        name = "torch_ops_ranks",
        testonly = True,
        srcs = ["torch_ops_ranks.py"],
        data = [":torch_python"],
    )

    [mpi_test(
        name = "torch_ops_%d_ranks_test" % np,
        size = "medium",
        args = [TORCH_ROOT],
        binary = ":torch_ops_ranks",
        expect_once = ["%d ranks: all as one" % np],
        mpi_timeout = 200,
        np = np,
    ) for np in [
        1,
        2,
        4,
    ]]

    # A rank that exits with an error ends the others, and a stopped rank is named.
    [mpi_test(
        name = "torch_ops_%s_test" % name,
        size = "medium",
        args = args + [TORCH_ROOT],
        binary = ":torch_ops_ranks",
        env = env,
        expect_exit = code,
        expect_once = words,
        forbid = ["the other rank came"] + unwanted,
        mpi_timeout = 200,
        np = 2,
    ) for name, args, env, code, words, unwanted in [
        ("failing_rank", ["--fail"], {}, 1, ["ValueError: a rank gave up"], ["[comm]"]),
        ("exiting_rank", ["--exit"], {}, 3, [], ["[comm]"]),
        ("stopped_rank", ["--stop"], {"ANNULUS_TIMEOUT": "2"}, 1, ["within 2 s; rank 1 is stopped"], []),
        (
            "caught_timeout",
            ["--caught"],
            {"ANNULUS_TIMEOUT": "2"},
            1,
            ["within 2 s; rank 1 is stopped", "[comm] rank 0: this process ends without MPI_Finalize, because"],
            [],
        ),
        ("timeout", ["--stop", "--timeout"], {}, 1, ["within 2 s; rank 1 is stopped"], []),
    ]]

    # The example swap.py, in one process and over ranks. It compares its loss with that of the model before the swap.
    native.sh_binary(
        name = "torch_example",
        testonly = True,
        srcs = ["torch_example.py"],
        data = [
            ":torch_python",
            "//examples/pytorch:swap.py",
        ],
    )

    [mpi_test(
        name = "torch_example_%d_ranks_test" % np,
        size = "medium",
        args = [
            "--length=64",
            "--steps=2",
            TORCH_ROOT,
        ],
        binary = ":torch_example",
        expect_once = ["(before the swap "],
        mpi_timeout = 200,
        np = np,
    ) for np in [
        1,
        2,
    ]]
