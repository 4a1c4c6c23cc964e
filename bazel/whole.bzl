"""whole_libraries(name, deps): deps and all libraries that they use, with alwayslink, so that a shared library contains
all of their objects and not only those to which it refers."""

def _impl(ctx):
    toolchain = ctx.attr._toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    merged = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    libraries, flags = [], []
    for used in merged.linking_context.linker_inputs.to_list():
        flags += used.user_link_flags
        for library in used.libraries:
            archive = library.pic_static_library or library.static_library
            if archive:
                libraries.append(cc_common.create_library_to_link(
                    actions = ctx.actions,
                    feature_configuration = features,
                    cc_toolchain = toolchain,
                    pic_static_library = archive,
                    alwayslink = True,
                ))
    linked = cc_common.create_linker_input(
        owner = ctx.label,
        libraries = depset(libraries),
        user_link_flags = depset(flags),
    )
    return [CcInfo(
        compilation_context = merged.compilation_context,
        linking_context = cc_common.create_linking_context(linker_inputs = depset([linked])),
    )]

whole_libraries = rule(
    implementation = _impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
)
