"""Tests of faults in processes: which rank the error names, how often it is printed, and the exit code. Used by BUILD."""

load("//bazel:mpi.bzl", "mpi_test")

_BINARY = "//integration_tests:comm_faults_main"

def _fault(name, fault, rank, np = 3, backend = "mpi", **kwargs):
    mpi_test(
        name = "comm_%s_test" % name,
        binary = _BINARY,
        np = np,
        args = ["'--fault=%s'" % fault, "--rank=%d" % rank, "--backend=" + backend],
        forbid = kwargs.pop("forbid", ["Segmentation fault", "free()", "finished"]),
        **kwargs
    )

def comm_tests():
    """Declares the tests of comm_faults_main."""
    short = {"ANNULUS_BOOTSTRAP_TIMEOUT": "2.5"}
    _fault("healthy", "none", 0, expect_once = ["bootstrapped 3 ranks", "local 0 of 3", "finished"], forbid = ["[comm]"])
    _fault(
        "blocked_rank",
        "blocked",
        2,
        env = short,
        expect_exit = 6,
        expect_once = ["3 ranks did not all come within 2.5 s", "rank 2 has not come"],
    )
    _fault("stopped_rank", "stopped", 0, env = short, expect_exit = 6, expect_once = ["[comm]", "rank 0 is stopped"])
    _fault("killed_rank", "killed", 1, env = short, expect_exit = 137)
    _fault("exiting_rank", "exits", 1, env = short, expect_exit = 3)
    _fault(
        "config",
        "config",
        1,
        expect_exit = 5,
        expect_once = ["ranks disagree before the start: config: train.lr is 0.1 on ranks 0,2, 0.2 on rank 1"],
    )
    _fault("version", "version", 0, expect_exit = 5, expect_once = ["version is 0.2.0 on rank 0, 0.1.0 on ranks 1-2"])
    _fault("device", "device", 2, expect_exit = 5, expect_once = ["device is cpu on ranks 0-1, cuda on rank 2"])
    _fault(
        "world_size",
        "none",
        0,
        np = 2,
        env = {"ANNULUS_WORLD_SIZE": "4"},
        expect_exit = 6,
        expect_once = ["MPI formed a world of 2 ranks, but 4 were started"],
    )
    _fault("input", "input", 2, expect_exit = 3, expect_once = ["[data] on rank 2: no such file: corpus.bin"])
    _fault("plan", "plan", 0, np = 2, expect_exit = 4, expect_once = ["[plan] 3 heads over 2 ranks"], forbid = ["finished", "on rank"])
    _fault(
        "shape",
        "shape",
        1,
        np = 2,
        expect_exit = 5,
        expect_once = ["ranks disagree before attention forward, call 12: shape is [1,128] on rank 0, [1,64] on rank 1"],
    )
    stopped = "rank 1 is stopped (SIGSTOP or a debugger; host "
    _fault("stops_later", "stops later", 1, np = 2, expect_exit = 6, expect_once = ["[comm] ring, hop", stopped])
    _fault("stops_before_a_sum", "stops before a sum", 1, np = 2, expect_exit = 6, expect_once = ["[comm] sum, step 6", stopped])
    _fault("stops_in_a_gather", "stops in a gather", 1, np = 2, expect_exit = 6, expect_once = ["within 1.5 s; " + stopped])
    end = {"env": {"ANNULUS_BOOTSTRAP_TIMEOUT": "5"}, "np": 2}
    _fault("ends_late", "ends late", 1, expect_once = ["the last one is done"], forbid = ["[comm]"], **end)
    _fault(
        "stops_at_its_end",
        "stops at its end",
        1,
        expect_exit = 6,
        expect_once = ["rank 0: [comm] MPI_Finalize did not return within 15 s", stopped],
        forbid = ["Segmentation fault"],
        **end
    )
    _fault("killed_later", "killed later", 1, np = 2, expect_exit = 137)
    _fault("throws_later", "throws later", 1, np = 2, expect_exit = 8, expect_once = ["[kernel] out of memory"])

    # No launcher ends the other rank here, so its own message and exit code are checked.
    killed_alone = {
        "expect_once": ["[comm] ring, hop", "bytes from rank 1", "(exit code 6)"],
        "mpi_args": ["--enable-recovery"],
        "np": 2,
    }
    gone = dict(killed_alone, expect_once = killed_alone["expect_once"] + ["; rank 1 is gone (host "])
    _fault("killed_alone", "killed later", 1, **gone)

    # The same between GPUs; the ranks share one GPU if there are no more.
    nccl = {"backend": "nccl", "np": 2, "size": "medium", "mpi_timeout": 120, "tags": ["gpu"]}
    _fault("nccl_healthy", "none", 0, expect_once = ["finished"], forbid = ["[comm]"], **nccl)
    _fault("nccl_stops_later", "stops later", 1, expect_exit = 6, expect_once = ["[comm] ring, hop"], **nccl)
    _fault("nccl_killed_alone", "killed later", 1, **dict(nccl, **killed_alone))
    _fault("nccl_throws_later", "throws later", 1, expect_exit = 8, expect_once = ["[kernel] out of memory"], **nccl)
