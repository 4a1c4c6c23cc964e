"""isa_test: a test that also runs with fewer vector instructions than the processor has (simd/instruction_set.h)."""

load("@rules_cc//cc:defs.bzl", "cc_test")

def isa_test(name, srcs, deps, **kwargs):
    """Makes NAME, which ends in _test, and ..._avx512bf16_test, ..._avx2_test and so on, which ANNULUS_ISA limits.

    Each test also fails if another version than the expected one ran, and is skipped if the processor lacks the
    instructions (asked_for.cc). The sources are compiled once.
    """
    cc_test(
        name = name,
        srcs = srcs,
        deps = deps + ["//tests/simd:asked_for"],
        **kwargs
    )
    for isa in ["avx512bf16", "avx512", "avx2", "baseline"]:
        native.sh_test(
            name = "%s_%s_test" % (name[:-len("_test")], isa),
            srcs = [":" + name],
            env = {"ANNULUS_ISA": isa},
            **kwargs
        )
