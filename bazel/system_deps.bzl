"""system_deps(name = "sys"): the machine's LibTorch, CUDA, NCCL, Open MPI, hwloc, ... as cc_library targets.

Nothing is downloaded here; tools/setup.sh installs libraries and looks in the same places. A library that is not found
becomes an incompatible target: `bazel build //...` skips targets that need it, building such a target by name prints
the reason, and @sys//:missing.txt lists what is missing and why (tools/test_report.py shows it).
"""

# ANNULUS_DEPS holds what tools/setup.sh last found (it writes .bazelrc.deps), so that Bazel notices a change.
_ENV = ["LIBTORCH", "CUDA_HOME", "CUDA_PATH", "NCCL_HOME", "MPI_HOME", "PKG_CONFIG_PATH", "PATH", "ANNULUS_DEPS"]

def _run(rctx, args):
    r = rctx.execute(args)
    return r.stdout.strip() if r.return_code == 0 else None

def _exists(rctx, p):
    return rctx.path(p).exists

def _env(rctx, *names):
    for n in names:
        v = rctx.os.environ.get(n, "")
        if v:
            return v
    return ""

def _link_dir(rctx, src, dst):
    if _exists(rctx, src):
        rctx.symlink(src, dst)
        return True
    return False

# A label of annulus as the generated files write it, whether annulus is the workspace that is built or one it uses.
def _own(label):
    text = str(Label(label))
    return text if text.startswith("@") else "@" + text

def _lib(name, incdirs = [], globs = [], defines = [], linkopts = [], deps = [], cuda_linkopts = []):
    return """
cc_library(
    name = "{n}",
    hdrs = glob({g}, allow_empty = True),
    includes = {i},
    defines = {d},
    linkopts = {l},
    deps = {deps},
)
""".format(
        n = name,
        g = repr(globs),
        i = repr(incdirs),
        d = repr(defines),
        l = _select(cuda_linkopts) + repr(linkopts),
        deps = repr(deps),
    )

def _select(with_cuda):
    if not with_cuda:
        return ""
    return "select({\"%s\": %r, \"//conditions:default\": []}) + " % (_own("//bazel:with_cuda"), with_cuda)

def _missing(name, why):
    return """
# missing: {n}: {why}
cc_library(name = "{n}", target_compatible_with = ["{never}"])
""".format(n = name, why = why, never = _own("//bazel:incompatible"))

def _pkg_config(rctx, name, pkg):
    flags = _run(rctx, ["pkg-config", "--cflags", "--libs", pkg])
    if flags == None:
        return _missing(name, "pkg-config does not know " + pkg)
    defines, links, incs, globs = [], [], [], []
    for f in flags.split(" "):
        if f.startswith("-D"):
            defines.append(f[2:])
        elif f.startswith("-I"):
            d = "%s/inc%d" % (name, len(incs))
            rctx.symlink(f[2:], d)
            incs.append(d)
            globs.append(d + "/**")
        elif f.startswith("-L"):
            links.extend([f, "-Wl,-rpath," + f[2:]])
        elif f:
            links.append(f)
    return _lib(name, incs, globs, defines, links)

def _torch(rctx):
    """LIBTORCH (an unpacked LibTorch, or .../site-packages/torch), otherwise the .venv of tools/setup.sh."""
    root = _env(rctx, "LIBTORCH")
    if not root:
        here = rctx.path(rctx.attr.workspace_file).realpath.dirname  # not Bazel's link to it
        venv = rctx.path(str(here) + "/.venv/lib")
        for python in venv.readdir() if venv.exists else []:
            if _exists(rctx, str(python) + "/site-packages/torch/lib/libtorch_cpu.so"):
                root = str(python) + "/site-packages/torch"
    if not root or not _exists(rctx, root + "/lib/libtorch_cpu.so"):
        why = "no lib/libtorch_cpu.so in LIBTORCH=" + root if root else "no LibTorch in .venv, and LIBTORCH is not set"
        return _missing("torch", why) + _missing("torch_cpu", why), [], "", False

    # NVIDIA's wheels lie beside torch: nvidia/nccl, ...
    beside = rctx.path(root).dirname.get_child("nvidia")
    nvidia = [str(p) for p in beside.readdir()] if beside.exists else []

    # Only these folders, because the wheel also contains headers of other libraries (fmt, ...) in its own versions.
    for d in ["torch", "ATen", "c10", "caffe2"]:
        rctx.symlink(root + "/include/" + d, "torch/include/" + d)
    libdir = root + "/lib"

    def_abi = []
    cmake = root + "/share/cmake/Torch/TorchConfig.cmake"
    if _exists(rctx, cmake) and "_GLIBCXX_USE_CXX11_ABI=0" in rctx.read(cmake):
        def_abi = ["_GLIBCXX_USE_CXX11_ABI=0"]
    links = ["-L" + libdir, "-Wl,-rpath," + libdir]
    cuda = _exists(rctx, libdir + "/libtorch_cuda.so")

    # libtorch.so is an empty library that loads everything, so its parts are named instead. A process that loads
    # libtorch_cuda starts 0.2 s later and takes 350 MB more, so only --config=cuda links it. It needs --no-as-needed
    # because it registers itself and no symbol of it may be used, and --allow-shlib-undefined because a machine that
    # only links may lack the libraries that it loads at run time (cuDNN, cuBLAS, ...).
    return _lib(
        "torch_cpu",
        ["torch/include", "torch/include/torch/csrc/api/include"],
        ["torch/include/" + g for g in ["torch/**", "ATen/**", "c10/**", "caffe2/**"]],
        def_abi,
        links + ["-ltorch_cpu", "-lc10"],
    ) + _lib(
        "torch",
        deps = [":torch_cpu"],
        cuda_linkopts = links + [
            "-Wl,--allow-shlib-undefined",
            "-Wl,--no-as-needed",
            "-ltorch_cuda",
            "-lc10_cuda",
            "-Wl,--as-needed",
        ] if cuda else [],
    ), nvidia, root, cuda

def _cuda(rctx, nvidia):
    home = _env(rctx, "CUDA_HOME", "CUDA_PATH") or "/usr/local/cuda"
    nvcc = home + "/bin/nvcc"
    out = ""
    if not _exists(rctx, nvcc):
        return _missing("cudart", "no CUDA toolkit at " + home) + _missing("nccl", "no CUDA toolkit"), ""
    lib = home + ("/lib64" if _exists(rctx, home + "/lib64") else "/lib")
    rctx.symlink(home + "/include", "cuda/include")
    out += _lib(
        "cudart",
        ["cuda/include"],
        ["cuda/include/**"],
        [],
        ["-L" + lib, "-Wl,-rpath," + lib, "-lcudart", "-ldl", "-lpthread", "-lrt"],
    )
    # NCCL comes from NCCL_HOME, else from the wheel that LibTorch's wheel depends on, else from the toolkit.
    cands = [_env(rctx, "NCCL_HOME")] + [p for p in nvidia if p.endswith("/nccl")] + [home, "/usr"]
    for c in cands:
        if c and _exists(rctx, c + "/include/nccl.h"):
            ld = [d for d in [c + "/lib64", c + "/lib", c + "/lib/x86_64-linux-gnu"] if _exists(rctx, d + "/libnccl.so.2")]
            if not ld:
                continue
            for h in ["nccl.h", "nccl_device.h", "nccl_device"]:
                _link_dir(rctx, c + "/include/" + h, "nccl/include/" + h)
            out += _lib("nccl", ["nccl/include"], ["nccl/include/**"], [], ["-L" + ld[0], "-Wl,-rpath," + ld[0], "-l:libnccl.so.2"], [":cudart"])
            return out, home
    return out + _missing("nccl", "no nccl.h with libnccl.so.2"), home

def _mpi(rctx):
    home = _env(rctx, "MPI_HOME")
    why = "no Open MPI in MPI_HOME=" + home if home else "no mpicxx of Open MPI"
    for cxx in [home + "/bin/mpicxx"] if home else [rctx.which("mpicxx"), rctx.which("mpicxx.openmpi")]:
        if not cxx or not _exists(rctx, cxx):
            continue
        incs = _run(rctx, [cxx, "--showme:incdirs"])  # the compiler wrapper of another MPI fails here
        libs = _run(rctx, [cxx, "--showme:libdirs"])
        inc = [d for d in (incs or "").split(" ") if d and _exists(rctx, d + "/mpi.h")]
        lib = [d for d in (libs or "").split(" ") if d and _exists(rctx, d + "/libmpi.so")]
        before, _, after = str(cxx).rpartition("mpicxx")
        run = before + "mpirun" + after
        if inc and lib and _exists(rctx, run):
            rctx.symlink(inc[0], "mpi/include")
            links = []
            for d in lib:
                links += ["-L" + d, "-Wl,-rpath," + d]

            # C API only: the C++ bindings (libmpi_cxx) were removed from MPI 3.
            return _lib(
                "mpi",
                ["mpi/include"],
                ["mpi/include/**/*.h"],
                ["OMPI_SKIP_MPICXX=1"],
                links + ["-lmpi"],
            ), run
        why = "%s is not Open MPI's, or its mpi.h, libmpi.so or mpirun is missing" % cxx
    return _missing("mpi", why), ""

def _headers(rctx, name, probe, dirs, linkopts = [], bases = ["/usr/local/include", "/usr/include"], deps = []):
    for base in bases:
        if _exists(rctx, base + "/" + probe):
            for d in dirs:
                rctx.symlink(base + "/" + d, name + "/include/" + d)
            return _lib(name, [name + "/include"], [name + "/include/**"], linkopts = linkopts, deps = deps)
    return _missing(name, "no " + probe)

def _impl(rctx):
    torch, nvidia, torch_root, torch_cuda = _torch(rctx)
    cuda, cuda_home = _cuda(rctx, nvidia)
    mpi, mpirun = _mpi(rctx)
    out = "load(\"@rules_cc//cc:defs.bzl\", \"cc_library\")\npackage(default_visibility = [\"//visibility:public\"])\n"
    out += torch + cuda + mpi
    for name, pkg in [
        ("hwloc", "hwloc"),
        ("spdlog", "spdlog"),
        ("gtest", "gtest"),
        ("gtest_main", "gtest_main"),
    ]:
        out += _pkg_config(rctx, name, pkg)
    out += _headers(rctx, "hwy", "hwy/highway.h", ["hwy"])
    out += _headers(rctx, "cli11", "CLI/CLI.hpp", ["CLI"])

    # These libraries are used as headers only, so that a package installed in a Python needs no further libraries.
    out += _headers(rctx, "tomlplusplus", "toml++/toml.h", ["toml++"])
    out += _headers(rctx, "xxhash", "xxhash.h", ["xxhash.h"])
    out += _headers(rctx, "json", "nlohmann/json.hpp", ["nlohmann"])
    out += _headers(rctx, "rapidcheck", "rapidcheck.h", ["rapidcheck", "rapidcheck.h"], ["-lrapidcheck"])
    out += "\nexports_files([\"missing.txt\"])\n"
    rctx.file("BUILD.bazel", out)
    missing = [l[len("# missing: "):] for l in out.split("\n") if l.startswith("# missing: ")]
    rctx.file("missing.txt", "".join([l.replace(": ", "\t", 1) + "\n" for l in missing]))
    rctx.file("config.bzl", "CUDA_HOME = %r\nNVCC = %r\nMPIRUN = %r\nTORCH_ROOT = %r\nTORCH_BYTES = %r\nTORCH_CUDA = %r\nTOKENIZER_PYTHON = %r\nFOLLOWER_PYTHON = %r\n" % (
        cuda_home,
        cuda_home + "/bin/nvcc" if cuda_home else "",
        mpirun,
        torch_root,
        _run(rctx, ["stat", "-L", "-c", "%s", torch_root + "/lib/libtorch_cpu.so"]) or "",
        torch_cuda,
        # tools/tokenizer_wheels.sh makes it before the tests that run it.
        str(rctx.path(rctx.attr.workspace_file).realpath.dirname) + "/.venv/bin/python",
        # python/follower/wheels.sh, likewise.
        str(rctx.path(rctx.attr.workspace_file).realpath.dirname) + "/.venv-follower/bin/python",
    ))

system_deps = repository_rule(
    implementation = _impl,
    attrs = {"workspace_file": attr.label(default = "//:WORKSPACE")},
    environ = _ENV,
    local = True,
    configure = True,
)
