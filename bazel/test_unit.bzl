"""cc_test_part and cc_test_unit: the tests of a folder, compiled together and linked into one program.

    load("//bazel:test_unit.bzl", "cc_test_part", "cc_test_unit")

    package(default_testonly = True)

    cc_test_part(name = "mesh_test", size = "small", srcs = ["mesh_test.cc"], deps = ["//runtime/training:mesh"])
    cc_test_part(name = "loops_test", size = "small", srcs = ["loops_test.cc"], deps = [...], each_isa = True)
    cc_test_unit()

A test program of its own costs the headers of LibTorch and GoogleTest again, and a link. So the tests of a folder are a
unit, like the sources of a package (unit.bzl), and one program. A part is still a test with a label: it runs the program in
a process of its own, which runs only the cases of the part's sources (tests/common/main.cc). So counters, caches and
settings of a process are those of a part, as its size, shards, data and tags are.

- A source declares everything in a namespace named after its file: `namespace annulus::mesh_test {`.
- Each part depends on GoogleTest and on the main function without saying so.
- each_isa: the part also runs with fewer vector instructions than the processor has (common/simd/instruction_set.h), as
  NAME_avx2_test and so on for NAME_test. Each run fails if another version than the expected one computed, and is
  skipped if the processor lacks the instructions or has no better ones (tests/common/simd/asked_for.cc).
- With `--config=separate`, and under sanitizers, a part has a program of its own, with its sources alone.
- A test is a cc_test, with a program of its own, if it links something in another version (a GPU, MPI), or is copied to
  other machines (tools/gpu_bundle.sh).
"""

load("@rules_cc//cc:defs.bzl", "cc_binary")
load(":unit.bzl", "cc_part", "cc_unit")

_ISAS = ["avx512bf16", "avx512", "avx2", "baseline"]
_ASKED_FOR = "//tests/common/simd:asked_for"
_MAIN = "//tests/common:main"

# It takes less time than -O2; what is tested is compiled as in the program.
_COPTS = ["-O1"]

def _impl(ctx):
    executable = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(output = executable, target_file = ctx.executable.program, is_executable = True)
    runfiles = ctx.runfiles(files = [ctx.executable.program] + ctx.files.data)
    for target in [ctx.attr.program] + ctx.attr.data:
        runfiles = runfiles.merge(target[DefaultInfo].default_runfiles)
    return [
        DefaultInfo(executable = executable, runfiles = runfiles),
        testing.TestEnvironment(dict(ctx.attr.env, ANNULUS_TEST_SOURCES = " ".join(ctx.attr.sources))),
        coverage_common.instrumented_files_info(ctx, dependency_attributes = ["program"]),
    ]

_part_test = rule(
    implementation = _impl,
    test = True,
    attrs = {
        "program": attr.label(executable = True, cfg = "target", mandatory = True),
        "sources": attr.string_list(doc = "names of the files whose cases run"),
        "data": attr.label_list(allow_files = True),
        "env": attr.string_dict(),
        "_lcov_merger": attr.label(default = "@bazel_tools//tools/test:lcov_merger", executable = True, cfg = "exec"),
        "_collect_cc_coverage": attr.label(
            default = "@bazel_tools//tools/test:collect_cc_coverage",
            executable = True,
            cfg = "exec",
        ),
    },
)

def cc_test_part(name, srcs, deps, each_isa = False, unit = "tests", **kwargs):
    """A test whose sources are compiled and linked with those of its folder.

    Args:
      name: as in cc_test.
      srcs: as in cc_test.
      deps: as in cc_test, without GoogleTest's main function.
      each_isa: whether the test also runs with each lesser set of vector instructions.
      unit: the name of the cc_test_unit.
      **kwargs: data, env, size, tags and other arguments of every test rule.
    """
    # Written in full, because a name with a colon alone would be that of another part.
    deps = ["//%s%s" % (native.package_name(), d) if d.startswith(":") else d for d in deps]
    deps += ["@sys//:gtest"] + ([_ASKED_FOR] if each_isa else [])
    cc_part(
        name = name + ".part",
        srcs = srcs,
        unit = unit + ".unit",
        visibility = ["//visibility:private"],
        deps = deps,
    )
    cc_binary(
        name = name + ".program",
        srcs = srcs,
        copts = _COPTS,
        tags = ["manual"],
        visibility = ["//visibility:private"],
        deps = deps + [_MAIN],
    )
    env, tags = kwargs.pop("env", {}), kwargs.pop("tags", [])
    for isa in [""] + (_ISAS if each_isa else []):
        _part_test(
            name = "%s_%s_test" % (name[:-len("_test")], isa) if isa else name,
            program = select({
                "//bazel:separate_tests": ":" + name + ".program",
                "//conditions:default": ":" + unit,
            }),
            sources = srcs + (["asked_for.cc"] if each_isa else []),
            env = dict(env, ANNULUS_ISA = isa, ANNULUS_EACH_ISA = "1") if isa else env,
            tags = tags + (["isa"] if isa else []),
            **kwargs
        )

def cc_test_unit(name = "tests"):
    """Compiles and links the parts that stand above it in the BUILD file.

    Args:
      name: the program.
    """
    cc_unit(
        name = name + ".unit",
        alwayslink = True,
        copts = _COPTS,
    )
    cc_binary(
        name = name,
        visibility = ["//visibility:private"],
        deps = [
            ":" + name + ".unit",
            _MAIN,
        ],
    )
