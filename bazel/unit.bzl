"""cc_part and cc_unit: the sources of a package, compiled together.

    load("//bazel:unit.bzl", "cc_part", "cc_unit")

    cc_part(name = "mesh", deps = ["//comm:communicator"])  # mesh.h and mesh.cc
    cc_part(name = "job", srcs = ["job.cc", "job_check.cc"], hdrs = ["job.h"], deps = [":mesh", "//runtime/model"])
    cc_unit()

Headers take most of the time that a source file takes to compile: LibTorch's are 3 to 6 seconds of parsing, and each file
instantiates and compiles the same templates again. A unit is one file that includes all sources of its parts, so the
compiler does that once for a package. Building the program takes a third of the CPU seconds that way (benchmarks/results/machine-c.md).

A part is used like a cc_library. What it includes is listed in its deps (tests/tools/layers_test.py checks), and it has its
own visibility, but its object code comes with that of the whole unit.

- Names in anonymous namespaces must differ within a unit. A macro that a source defines is undefined at its end.
- `--config=separate` compiles each source by itself, which is faster while one file of a large package is edited, and finds
  a source that lacks an include, which a unit may hide.
- Flags (copts, linkopts, local_defines) belong to the unit. A source that needs flags of its own is a cc_library beside
  the unit; if parts depend on it, it is listed in cc_unit's deps.
- A package whose parts do not all use LibTorch has two units: cc_part(unit = "plain", ...), cc_unit(name = "plain").
- What a part needs for CUDA alone (cuda_deps) is not passed on to the code that uses the part, so that its compile commands are
  those of a build without CUDA, and a build for CUDA finds its object files.
"""

load("@rules_cc//cc:defs.bzl", "cc_library")

# For packages whose code runs once in a job or when a user asks for something, never in a step: it compiles a quarter faster.
RUNS_ONCE = ["-O1"]

def _select(cuda, cpu):
    return select({"//bazel:with_cuda": cuda, "//conditions:default": cpu}) if cuda or cpu else []

def _inside(label):
    return label.startswith(":")

def _linked_impl(ctx):
    return [
        CcInfo(linking_context = ctx.attr.dep[CcInfo].linking_context),
        coverage_common.instrumented_files_info(ctx, dependency_attributes = ["dep"]),
    ]

# A library as far as the linker is concerned: without its headers, folders of headers and macros.
_linked = rule(
    implementation = _linked_impl,
    attrs = {"dep": attr.label(providers = [CcInfo], mandatory = True)},
)

def cc_part(
        name,
        srcs = [],
        hdrs = [],
        deps = [],
        cuda_srcs = [],
        cpu_srcs = [],
        cuda_deps = [],
        unit = "unit",
        **kwargs):
    """A library whose sources are compiled with its package's unit.

    Without srcs and hdrs it has the header NAME.h and, if there is one, the source NAME.cc.

    Args:
      name: as in cc_library.
      srcs: as in cc_library, headers that only the package includes among them.
      hdrs: as in cc_library.
      deps: as in cc_library; those of the same package are parts, or stand in cc_unit's deps.
      cuda_srcs: sources of builds for CUDA.
      cpu_srcs: sources of other builds.
      cuda_deps: further dependencies of sources in builds for CUDA, of which no header of the part includes anything.
      unit: the name of the cc_unit.
      **kwargs: visibility and other arguments of every rule.
    """
    if not srcs and not hdrs:
        srcs, hdrs = native.glob([name + ".cc"], allow_empty = True), [name + ".h"]
    tags = ["part of " + unit]
    if srcs or cuda_srcs or cpu_srcs:
        tags.append("source of " + unit)
    outside = [d for d in deps if not _inside(d)]
    native.filegroup(
        name = name + ".sources",
        srcs = srcs + _select(cuda_srcs, cpu_srcs),
        visibility = ["//visibility:private"],
    )
    native.filegroup(name = name + ".headers", srcs = hdrs, visibility = ["//visibility:private"])
    if cuda_deps:
        tags.append("cuda")
        cc_library(name = name + ".cuda_deps", deps = _select(cuda_deps, []), visibility = ["//visibility:private"])
    cc_library(name = name + ".deps", deps = outside, tags = tags, visibility = ["//visibility:private"])
    cc_library(name = name, hdrs = hdrs, deps = outside + [":" + unit], **kwargs)

def cc_unit(name = "unit", deps = [], cuda_defines = [], local_defines = [], copts = [], **kwargs):
    """Compiles the parts that stand above it in the BUILD file.

    Args:
      name: what parts call it.
      deps: libraries of the same package that parts depend on and that are no parts of this unit, and libraries of other
        packages that at least half of the parts use; parts need not list these.
      cuda_defines: macros of builds for CUDA.
      local_defines: as in cc_library.
      copts: as in cc_library.
      **kwargs: linkopts, as in cc_library.
    """
    tags = {
        rule["name"][:-len(".deps")]: rule["tags"]
        for rule in native.existing_rules().values()
        if "part of " + name in rule.get("tags", [])
    }
    sources = [":" + part + ".sources" for part in sorted(tags) if "source of " + name in tags[part]]
    native.filegroup(  # because Bazel warns of a header that hdrs gets from two parts
        name = name + "_headers",
        srcs = [":" + part + ".headers" for part in sorted(tags)],
        visibility = ["//visibility:private"],
    )
    native.genrule(
        name = name + "_source",
        srcs = sources,
        outs = [name + ".cc"],
        # By their paths in this workspace: in another one that uses it they lie below external/annulus.
        cmd = "for f in $(SRCS); do f=$${f#external/*/}; f=$${f#../*/}; " +
              "case $$f in *.cc) echo \"#include \\\"$$f\\\"\" ;; esac; done >$@",
        visibility = ["//visibility:private"],
    )
    headers = [":" + name + "_headers"]
    deps = deps + [":" + part + ".deps" for part in tags]
    private = [":" + part + ".cuda_deps" for part in tags if "cuda" in tags[part]]
    compiled = name + ".compiled" if private else name
    cc_library(
        name = compiled,
        srcs = select({
            "//bazel:separate": sources,
            "//conditions:default": [name + ".cc"],
        }),
        hdrs = headers,
        textual_hdrs = select({
            "//bazel:separate": [],
            "//conditions:default": sources,
        }),
        deps = deps + private,
        local_defines = local_defines + _select(cuda_defines, []),
        copts = copts + [
            "-Wno-subobject-linkage",  # said of anonymous namespaces outside of the main file
        ],
        visibility = ["//visibility:private"],
        **kwargs
    )
    if private:
        _linked(name = name + ".linked", dep = ":" + compiled, visibility = ["//visibility:private"])
        cc_library(name = name, hdrs = headers, deps = deps + [":" + name + ".linked"], visibility = ["//visibility:private"])
