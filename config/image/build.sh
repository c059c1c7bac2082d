#!/bin/sh
# Builds the programs of the image, in the build stage of config/Dockerfile.
#   build.sh ARCHITECTURE DIR     ARCHITECTURE is amd64, arm64, or empty for that of the compiler
# A folder `vendor` with .cargo/config.toml, as `make image` lays them out, makes the build work without a network.
set -eu
host=$(rustc -vV | sed -n 's/^host: //p')
case $1 in
  '') target=$host ;;
  amd64) target=x86_64-unknown-linux-gnu ;;
  arm64) target=aarch64-unknown-linux-gnu ;;
  *) echo "build for $1: bindguard has programs for amd64 and arm64 only" >&2; exit 1 ;;
esac

if [ "$target" != "$host" ]; then
  compiler=$(echo "$target" | sed 's/-unknown//')-gcc
  command -v "$compiler" >/dev/null || {
    echo "build for $1: the build image has no $compiler; install it there, or build on a machine of that architecture" >&2; exit 1
  }
  [ -d "$(rustc --print target-libdir --target "$target")" ] || {
    echo "build for $1: the build image has no Rust library for $target; install it there, or build on a machine of that architecture" >&2
    exit 1
  }
  export "CARGO_TARGET_$(echo "$target" | tr 'a-z-' 'A-Z_')_LINKER=$compiler"
fi
command -v protoc >/dev/null || { apt-get -qq update && apt-get -qq -y --no-install-recommends install protobuf-compiler; }

make --old-file setup build "TARGET=$target" "BINDGUARD_REVISION=${REVISION:-}"
mkdir -p "$2"
for program in containerd-shim-bindguard-v2 bindguard-runtime bindguard bindguard-agent; do
  mv "target/$target/release/$program" "$2/"
done
# the layer keeps what is left
rm -rf target
