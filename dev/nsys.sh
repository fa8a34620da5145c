#!/usr/bin/env bash
# nsys for an image that has Nsight Systems only inside Nsight Compute, as NVIDIA's CUDA images do. There `nsys profile`
# leaves a .qdstrm, since its importer lacks libdw and friends. Given those as Debian packages, this finishes the job:
#   mkdir -p .deb && (cd .deb && apt-get download libdw1 libelf1 libbz2-1.0 liblzma5)
#   ln -s "$PWD/dev/nsys.sh" .deb/nsys
#   PATH=$PWD/.deb:$PATH A2LIB_NSYS_DEBS=$PWD/.deb papermill notebooks/profile.ipynb
# Takes `profile ... --output=REPORT ... COMMAND` and any other command of nsys.
set -euo pipefail
root=$(ls -d "${A2LIB_NSIGHT_COMPUTE:-/opt/nvidia/nsight-compute}"/* | tail -n 1)
nsys=$root/host/target-linux-x64/nsys
importer=$(ls "$root"/host/linux-desktop-*/QdstrmImporter | tail -n 1)
libs=$A2LIB_NSYS_DEBS/unpacked
if [ ! -d "$libs" ]; then
  mkdir -p "$libs"
  for package in "$A2LIB_NSYS_DEBS"/*.deb; do dpkg -x "$package" "$libs"; done
fi
path=$libs/usr/lib/x86_64-linux-gnu:$libs/lib/x86_64-linux-gnu:$(dirname "$importer")
if [ "$1" != profile ]; then
  LD_LIBRARY_PATH=$path exec "$nsys" "$@"
fi
report=
for word in "$@"; do
  case $word in --output=*) report=${word#--output=}; break ;; esac
done
# The command itself runs with the libraries it knows.
status=0
"$nsys" "$@" || status=$?
if [ ! -f "$report.nsys-rep" ] && [ -f "$report.qdstrm" ]; then
  LD_LIBRARY_PATH=$path QT_QPA_PLATFORM=offscreen "$importer" -i "$report.qdstrm" -o "$report.nsys-rep"
  rm -f "$report.qdstrm"
fi
exit $status
