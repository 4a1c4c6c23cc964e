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

- np is a number of processes, or a list of such, which run one after the other.
- The report has each rank's output under its number. If the binary uses GoogleTest (`@annulus//comm/testing`, with
  `@annulus//comm/testing:processes_main` in place of gtest_main), the one result file has the cases of all ranks.
- A binary that cannot run here (for example without a GPU) prints one line "SKIPPED: reason" from one rank and exits
  with code 0 on all ranks; the test then counts as skipped, whatever else was expected.
- WANT_SIZE holds the number of processes in every rank. Nothing else is set up for the binary, which calls bootstrap()
  or MPI_Init().
- More ranks than cores are possible: ranks are not bound, MPI yields, and waits of comm/mpi sleep. cpu:np tells Bazel's
  scheduler how many cores the test takes.
- After mpi_timeout (seconds, default 50) the stacks of all ranks are printed and the ranks ended, which counts as exit
  code 110. This is before Bazel's own limit of 60 s for size small. The variable MPI_TEST_TIMEOUT replaces it
  (tools/gpu_bundle/run.py). A process that the job leaves behind is ended, too, and the test fails.
- mpirun's exit code is that of a rank; 128 + signal if a rank is killed; 1 if a rank exits with code 0 but without
  MPI_Finalize.
- faults: a plan of faults (comm/testing/fault_plan.h) for the binary's calls of MPI, such as "kill:rank=1,nth=40".
- hosts: the ranks lie on so many simulated hosts, host1, host2, ..., which the binary can cut off
  (comm/testing/simulated_hosts.h). The test is skipped where no network namespaces can be made.
- It works with Open MPI 4 (btl vader) and 5 (btl sm). comm/testing/mpi_runner.py does all of it; it needs python3.
"""

load("@sys//:config.bzl", "MPIRUN")

def _quote(text):
    return "'" + text.replace("'", "'\\''") + "'"

def _impl(ctx):
    exe = ctx.actions.declare_file(ctx.label.name + ".sh")
    words = ["--np=" + ",".join([str(n) for n in ctx.attr.np])]
    words += ["--name=" + ctx.label.name, "--timeout=%d" % ctx.attr.mpi_timeout, "--expect-exit=%d" % ctx.attr.expect_exit]
    words += ["--mpi-arg=" + w for w in ctx.attr.mpi_args]
    words += ["--expect-once=" + t for t in ctx.attr.expect_once] + ["--forbid=" + t for t in ctx.attr.forbid]
    files = [ctx.executable.binary, ctx.file._runner]
    if ctx.attr.faults:
        words += ["--faults=" + ctx.attr.faults, "--faults-library=" + ctx.file.faults_library.short_path]
        files.append(ctx.file.faults_library)
    if ctx.attr.hosts:
        words.append("--hosts=%d" % ctx.attr.hosts)
        files += ctx.files.hosts_files
    ctx.actions.write(exe, "#!/bin/bash\nexec python3 %s --mpirun=%s %s -- ./%s \"$@\"\n" % (
        ctx.file._runner.short_path,
        MPIRUN,
        " ".join([_quote(w) for w in words]),
        ctx.executable.binary.short_path,
    ), is_executable = True)
    rf = ctx.runfiles(files = files).merge(ctx.attr.binary[DefaultInfo].default_runfiles)
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
        "np": attr.int_list(mandatory = True),
        "mpi_timeout": attr.int(default = 50),
        "mpi_args": attr.string_list(),
        "expect_exit": attr.int(default = 0),
        "expect_once": attr.string_list(),
        "forbid": attr.string_list(),
        "env": attr.string_dict(),
        "faults": attr.string(),
        "faults_library": attr.label(allow_single_file = True),
        "hosts": attr.int(default = 0),
        "hosts_files": attr.label_list(allow_files = True),
        "_runner": attr.label(default = "//comm/testing:mpi_runner.py", allow_single_file = True),
        "_lcov_merger": attr.label(default = "@bazel_tools//tools/test:lcov_merger", executable = True, cfg = "exec"),
        "_collect_cc_coverage": attr.label(default = "@bazel_tools//tools/test:collect_cc_coverage", executable = True, cfg = "exec"),
    },
)

def mpi_test(name, binary, np, tags = [], faults = "", hosts = 0, **kwargs):
    """Described at the head of this file. Other arguments are those of every test rule (size, args, env, ...)."""
    numbers = np if type(np) == "list" else [np]
    _mpi_run_test(
        name = name,
        binary = binary,
        np = numbers,
        # Namespaces cannot be made inside of that of Bazel's sandbox.
        tags = tags + ["mpi", "cpu:%d" % max(numbers)] + (["local"] if hosts else []),
        size = kwargs.pop("size", "small"),
        faults = faults,
        faults_library = Label("//comm/testing:libannulus_mpi_faults.so") if faults else None,
        hosts = hosts,
        hosts_files = [Label("//python/annulus:simulated_hosts")] if hosts else [],
        **kwargs
    )
