"""torch_stubs: a folder of stub libraries in place of NVIDIA's (tools/cuda_stubs.py), made once for all tests in Python that
import torch. Reading the symbols of LibTorch takes longer than most of these tests."""

def _impl(ctx):
    folder = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run_shell(
        command = "%s %s/lib %s" % (ctx.file.script.path, ctx.attr.torch, folder.path),
        inputs = [ctx.file.script, ctx.file._elf],
        outputs = [folder],
        env = {"PATH": "/usr/bin:/bin", "TORCH_BYTES": ctx.attr.torch_bytes},
        mnemonic = "TorchStubs",
        progress_message = "Making stubs of NVIDIA's libraries",
    )
    return [DefaultInfo(files = depset([folder]), runfiles = ctx.runfiles(files = [folder]))]

torch_stubs = rule(
    implementation = _impl,
    attrs = {
        "script": attr.label(allow_single_file = True, mandatory = True),
        "_elf": attr.label(allow_single_file = True, default = "//tools:elf.py"),
        "torch": attr.string(doc = "the folder of LibTorch"),
        "torch_bytes": attr.string(doc = "the size of its largest library, by which Bazel notices another LibTorch"),
    },
)
