"""mpi_test: runs a test binary under the machine's mpirun with `np` ranks."""

load("@sys//:config.bzl", "MPIRUN")

_SCRIPT = """#!/bin/bash
set -u
# TMPDIR: Open MPI's session directory; a long path breaks its unix sockets (108 bytes).
export HOME="${{HOME:-$TEST_TMPDIR}}"
export TMPDIR="$(mktemp -d /dev/shm/annulus.XXXXXX)"
# In a sandbox (own PID namespace) every mpirun has the same PID, so the same job id, and
# concurrent tests would map each other's /dev/shm/vader_segment.*: give each test its own folder.
export OMPI_MCA_btl_vader_backing_directory="$TMPDIR" OMPI_MCA_osc_sm_backing_directory="$TMPDIR" OMPI_MCA_osc_rdma_backing_directory="$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_base_warn_component_unused=0
export OMP_NUM_THREADS=1
unset TEST_PREMATURE_EXIT_FILE XML_OUTPUT_FILE
export WANT_SIZE={np}
{mpirun} --oversubscribe --bind-to none --timeout {timeout} -np {np} {extra} ./{bin} "$@"; rc=$?; echo "mpirun exit $rc"; exit $rc
"""

def _impl(ctx):
    exe = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(exe, _SCRIPT.format(
        mpirun = MPIRUN,
        np = ctx.attr.np,
        timeout = ctx.attr.mpi_timeout,
        extra = " ".join(ctx.attr.mpi_args),
        bin = ctx.executable.binary.short_path,
    ), is_executable = True)
    rf = ctx.runfiles(files = [ctx.executable.binary]).merge(ctx.attr.binary[DefaultInfo].default_runfiles)
    return [
        DefaultInfo(executable = exe, runfiles = rf),
        testing.TestEnvironment(ctx.attr.env),
        coverage_common.instrumented_files_info(ctx, dependency_attributes = ["binary"]),
    ]

_mpi_run_test = rule(
    implementation = _impl,
    test = True,
    attrs = {
        "binary": attr.label(executable = True, cfg = "target", mandatory = True),
        "np": attr.int(mandatory = True),
        "mpi_timeout": attr.int(default = 50),
        "mpi_args": attr.string_list(),
        "env": attr.string_dict(),
        "_lcov_merger": attr.label(default = "@bazel_tools//tools/test:lcov_merger", executable = True, cfg = "exec"),
        "_collect_cc_coverage": attr.label(default = "@bazel_tools//tools/test:collect_cc_coverage", executable = True, cfg = "exec"),
    },
)

def mpi_test(name, binary, np, tags = [], **kwargs):
    _mpi_run_test(
        name = name,
        binary = binary,
        np = np,
        # cpu:N: the scheduler counts N of the machine's cores for it.
        tags = tags + ["mpi", "cpu:%d" % np],
        size = kwargs.pop("size", "small"),
        **kwargs
    )
