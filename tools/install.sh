#!/bin/bash
# ./annulus install PREFIX: builds annulus and copies what is needed to run it to the folder PREFIX: the program, the
# libraries of LibTorch that it needs, headers and a library for your own programs, configurations and documents. Other
# hosts run PREFIX/bin/annulus from a shared file system, a copy of the folder or a container image, without Bazel,
# Python or this clone. They need Open MPI's mpirun and hwloc's library; PREFIX/README says which versions. PREFIX is
# created if it does not exist; an older installation in it is replaced; a folder with anything else is refused.
set -euo pipefail
typed=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/arguments.sh
refuse_empty_arguments "annulus: install" "$@"
case ${1-} in
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' tools/install.sh && exit 0 ;;
esac
if [[ $# != 1 || $1 == -* ]]; then
  echo "usage: ./annulus install PREFIX   (the folder to install to; --help says more)" >&2
  exit 2
fi
prefix=$1
[[ $prefix == /* ]] || prefix=$typed/$prefix
python3 tools/install.py --check "$prefix" # first, because the build takes time
tools/setup.sh
. tools/live.sh
build_or_exit //launcher:annulus //benchmarks/program:annulus_bench //tools:libannulus.so \
  //comm/testing:libannulus_mpi_faults.so
sources=$(bazel query --noshow_progress 'let users = //tools:compiled_by_users in
  filter("^//.*[.]h$", kind("source file", deps(//tools:libannulus.so + $users))) +
  filter("^//.*[.]cc$", labels(srcs, labels(deps, $users)))')
python3 tools/install.py --bin .bazel/bin --sources "$sources" "$prefix"
