"""mpi_test: runs a test binary under the machine's mpirun. Used by annulus's own tests and those of other workspaces.

    load("@annulus//bazel:mpi.bzl", "mpi_test")

    cc_binary(name = "ring", testonly = True, srcs = ["ring.cc"], deps = ["@annulus//comm/bootstrap", ...])

    mpi_test(
        name = "ring_test",
        binary = ":ring",
        np = 3,
        args = ["--steps=5"],                          # arguments of the binary
        env = {"ANNULUS_BOOTSTRAP_TIMEOUT": "2"},
        expect_exit = 6,                               # mpirun's exit code: that of the first rank that failed (0)
        expect_once = ["rank 2 has not come"],         # must be in exactly one line of the output of all ranks
        forbid = ["Segmentation fault"],               # must not be in the output
    )

- A binary that cannot run here (for example without a GPU) prints one line "SKIPPED: reason" from one rank and exits
  with code 0 on all ranks; the test then counts as skipped, whatever else was expected.
- WANT_SIZE holds np in every rank. Nothing else is set up for the binary, which calls bootstrap().
- More ranks than cores are possible: ranks are not bound, MPI yields, and waits of comm/mpi sleep. cpu:np tells Bazel's
  scheduler how many cores the test takes.
- After mpi_timeout (seconds, default 50), mpirun ends the ranks and exits with 110. This is before Bazel's own limit of
  60 s for size small. The variable MPI_TEST_TIMEOUT replaces it (tools/gpu_bundle/run.py).
- mpirun's exit code is that of a rank; 128 + signal if a rank is killed; 1 if a rank exits with code 0 but without
  MPI_Finalize; or 110 after mpi_timeout.
- It works with Open MPI 4 (btl vader) and 5 (btl sm): both names of a setting are given; the unknown one is ignored.
"""

load("@sys//:config.bzl", "MPIRUN")

_SCRIPT = """#!/bin/bash
set -u
# TMPDIR: Open MPI's session directory; a long path breaks its unix sockets (108 bytes).
export HOME="${{HOME:-$TEST_TMPDIR}}"
export TMPDIR="$(mktemp -d /dev/shm/annulus.XXXXXX)"
# In a sandbox (own PID namespace) every mpirun has the same PID, so the same job id, and
# concurrent tests would map each other's /dev/shm/vader_segment.*: give each test its own folder.
for name in btl_vader btl_sm osc_sm osc_rdma; do export OMPI_MCA_${{name}}_backing_directory="$TMPDIR"; done
trap 'rm -rf "$TMPDIR"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_base_warn_component_unused=0
export OMP_NUM_THREADS=1
unset TEST_PREMATURE_EXIT_FILE XML_OUTPUT_FILE
export WANT_SIZE={np}
log="$TMPDIR/output"
{mpirun} --oversubscribe --bind-to none --timeout "${{MPI_TEST_TIMEOUT:-{timeout}}}" -np {np} {extra} ./{bin} "$@" >"$log" 2>&1
rc=$?
cat "$log"
echo "mpirun exit $rc"
# Nothing was tried: there is nothing to check.
if [[ $rc == 0 ]] && grep -q "^SKIPPED: " "$log"; then exit 0; fi
failed=0
if [[ $rc != {expect_exit} ]]; then
  echo "FAILED: mpirun's exit code is $rc, expected {expect_exit}"
  failed=1
fi
once() {{
  local lines
  lines=$(grep -cF -- "$1" "$log")
  [[ $lines == 1 ]] || {{ echo "FAILED: $lines lines hold, instead of one: $1"; failed=1; }}
}}
forbid() {{
  if grep -qF -- "$1" "$log"; then echo "FAILED: the output holds: $1"; failed=1; fi
}}
{checks}
exit $failed
"""

def _quote(text):
    return "'" + text.replace("'", "'\\''") + "'"

def _impl(ctx):
    exe = ctx.actions.declare_file(ctx.label.name + ".sh")
    checks = ["once " + _quote(t) for t in ctx.attr.expect_once] + ["forbid " + _quote(t) for t in ctx.attr.forbid]
    ctx.actions.write(exe, _SCRIPT.format(
        mpirun = MPIRUN,
        np = ctx.attr.np,
        timeout = ctx.attr.mpi_timeout,
        extra = " ".join(ctx.attr.mpi_args),
        bin = ctx.executable.binary.short_path,
        expect_exit = ctx.attr.expect_exit,
        checks = "\n".join(checks),
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
        "expect_exit": attr.int(default = 0),
        "expect_once": attr.string_list(),
        "forbid": attr.string_list(),
        "env": attr.string_dict(),
        "_lcov_merger": attr.label(default = "@bazel_tools//tools/test:lcov_merger", executable = True, cfg = "exec"),
        "_collect_cc_coverage": attr.label(default = "@bazel_tools//tools/test:collect_cc_coverage", executable = True, cfg = "exec"),
    },
)

def mpi_test(name, binary, np, tags = [], **kwargs):
    """Described at the head of this file. Other arguments are those of every test rule (size, args, env, ...)."""
    _mpi_run_test(
        name = name,
        binary = binary,
        np = np,
        tags = tags + ["mpi", "cpu:%d" % np],
        size = kwargs.pop("size", "small"),
        **kwargs
    )
